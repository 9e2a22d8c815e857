"""`python -m dicp.conformance`: the command line. `python -m dicp.conformance fuzz`: random graphs, see
fuzz.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import vendors

if TYPE_CHECKING:
    from .unit import Unit, UnitResult


SPREAD = 29  # a prime: kinds of units, which follow each other, take turns


def parser() -> argparse.ArgumentParser:
    """The options of a run."""
    p = argparse.ArgumentParser(prog="python -m dicp.conformance", description=__doc__)
    p.add_argument("--vendor", default="cpu_graph", help="a registered vendor (default: %(default)s)")
    p.add_argument(
        "--backend", help="any torch.compile backend instead of a vendor: inductor, aot_eager, ..."
    )
    p.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this first, in every worker (it may register a backend); repeatable",
    )
    p.add_argument(
        "--device", help="where the tensors live (default: the vendor's device; cpu for a --backend)"
    )
    p.add_argument(
        "--ops", default="", metavar="REGEX", help="operators whose full name this matches (search)"
    )
    p.add_argument(
        "--dtypes", default="", help="comma-separated; default: a list per kind of run, see plan.py"
    )
    p.add_argument(
        "--dynamic", action="store_true", help="also compile with dynamic=True, and call with second sizes"
    )
    p.add_argument("--grad", action="store_true", help="also forward and backward, gradients compared")
    p.add_argument("--only-dynamic", action="store_true", help="only dynamic=True")
    p.add_argument("--only-grad", action="store_true", help="only gradients")
    p.add_argument(
        "--samples", type=int, default=8, metavar="N", help="database samples per operator and dtype"
    )
    p.add_argument("--case", metavar="ID", help="only the case of this id, such as s3 or s3:transposed")
    p.add_argument("--shard", default="1/1", metavar="i/n", help="the i-th of n interleaved parts")
    p.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    p.add_argument(
        "--timeout", type=float, default=240.0, metavar="S", help="seconds before a silent worker is killed"
    )
    p.add_argument(
        "--seconds", type=float, metavar="S", help="begin no unit after that time; units in another order"
    )
    p.add_argument(
        "--resume", type=Path, metavar="DIR", help="keep results here, and do not run again what is there"
    )
    p.add_argument("--report", action="store_true", help="run nothing: report on what --resume DIR holds")
    p.add_argument("--json", type=Path, metavar="F")
    p.add_argument("--junit", type=Path, metavar="F")
    p.add_argument("--html", type=Path, metavar="F")
    p.add_argument(
        "--coverage", type=Path, metavar="F", help="write the coverage table docs/operators.md is made of"
    )
    p.add_argument("--verbose", action="store_true", help="list every failure and every extern")
    p.add_argument("--list", action="store_true", help="print the units and stop")
    return p


def shard_of(text: str) -> tuple[int, int]:
    """`2/8` -> (2, 8)"""
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise SystemExit(f"--shard {text}: expected i/n with 1 <= i <= n")
    return int(number), int(of)


def pattern_of(text: str) -> str:
    """A regular expression."""
    try:
        re.compile(text)
    except re.error as e:
        raise SystemExit(f"--ops {text!r} is no regular expression: {e}") from e
    return text


def dtypes_of(text: str) -> tuple[str, ...]:
    """`float32,int64` -> (float32, int64)"""
    from .unit import dtype_named

    names = tuple(d for d in text.split(",") if d)
    for name in names:
        try:
            dtype_named(name)
        except ValueError as e:
            raise SystemExit(f"--dtypes {text}: {e}") from e
    return names


def _need(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "torch sees no CUDA GPU; DICP_CUDA_INTERPRET=1 runs the kernels of cuda_graph on CPU tensors"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: everything as it should be; 1: failures; 2: wrong options."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "fuzz":
        from .fuzz import main as fuzz

        return fuzz(argv[1:])
    if argv and argv[0] == "docs":
        from .docs import main as docs

        return docs(argv[1:])
    args = parser().parse_args(argv)
    from .plan import Plan

    if args.report and args.resume is None:
        raise SystemExit("--report tells what --resume DIR holds: name the folder")
    backend = args.backend or vendors.backend_of(args.vendor)
    device = args.device or ("cpu" if args.backend else vendors.device_of(args.vendor))
    plan = Plan(
        pattern_of(args.ops),
        dtypes_of(args.dtypes),
        args.dynamic or args.only_dynamic,
        args.grad or args.only_grad,
        args.samples,
        shard_of(args.shard),
        device,
        args.case,
        not args.only_dynamic,
        not args.only_grad,
    )
    units = plan.units()
    if not units and not replace(plan, shard=(1, 1)).units():  # a shard alone may be empty
        print(
            f"no operator to run: --ops {args.ops!r} is a regular expression, searched for in full names as "
            "nn.functional.gelu is; --dtypes chooses among them; --list shows what is chosen",
            file=sys.stderr,
        )
        return 2
    if args.list:
        print("\n".join(u.key for u in units))
        return 0
    if not args.report:
        _need(device)
        vendors.require_backend(backend, args.modules)
    if args.resume:
        return checked(units, backend, device, args.resume, args)
    with tempfile.TemporaryDirectory(prefix="dicp_conformance_") as folder:
        return checked(units, backend, device, Path(folder), args)


def checked(units: list[Unit], backend: str, device: str, folder: Path, args: argparse.Namespace) -> int:
    """Run what the folder has no results of, and report on all."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "results.jsonl"
    same_run(folder, {"backend": backend, "device": device, "samples": args.samples})
    results: list[UnitResult] = read_results(kept, {u.key for u in units})
    done = {r.key for r in results}
    waiting = [u for u in units if u.key not in done]
    started = time.perf_counter()
    if not args.report:
        run(waiting, results, kept, folder, backend, args)
    seconds = time.perf_counter() - started
    return finish(results, backend, device, seconds, args)


def same_run(folder: Path, settings: dict[str, object]) -> None:
    """Refuse to mix results of different backends in one folder."""
    path = folder / "run.json"
    if path.exists() and json.loads(path.read_text()) != settings:
        raise SystemExit(
            f"{folder} holds a run with other settings: {path.read_text()}; now {json.dumps(settings)}"
        )
    path.write_text(json.dumps(settings))


def read_results(path: Path, wanted: set[str]) -> list[UnitResult]:
    """Results of an earlier run; a last line cut short by a kill is dropped."""
    from .unit import from_json

    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            result = from_json(json.loads(line))
        except json.JSONDecodeError:
            continue
        if result.key in wanted:
            found.append(result)
    return found


def run(
    waiting: list[Unit],
    results: list[UnitResult],
    kept: Path,
    folder: Path,
    backend: str,
    args: argparse.Namespace,
) -> None:
    """Run the waiting units, each result written as it comes."""
    from .pool import Pool

    terminal = sys.stderr.isatty()
    started, total, fails = time.perf_counter(), len(waiting), 0
    ended = 0
    with kept.open("a") as out:

        def report(result: UnitResult) -> None:
            nonlocal ended, fails
            out.write(json.dumps(result.to_json()) + "\n")
            out.flush()
            results.append(result)
            ended += 1
            bad = sum(c.status == "fail" for c in result.cases)
            fails += bad
            spent = time.perf_counter() - started
            left = spent / ended * (total - ended)
            line = f"{ended}/{total} units, {fails} failing cases, {left / 60:.0f} min left  {result.key}"
            if terminal:
                print(f"\r\033[K{line[:110]}", end="", file=sys.stderr, flush=True)
            elif bad or ended % 200 == 0:
                print(line, file=sys.stderr, flush=True)

        if waiting:
            workers = max(1, min(args.workers, len(waiting)))
            pool = Pool(backend, tuple(args.modules), workers, args.timeout, folder)
            pool.run(waiting if args.seconds is None else _until(waiting, started + args.seconds), report)
    if terminal:
        print(file=sys.stderr)


def _until(units: list[Unit], end: float) -> Iterator[Unit]:
    """Units spread over all operators, as long as there is time."""
    for first in range(SPREAD):
        for unit in units[first::SPREAD]:
            if time.perf_counter() > end:
                return
            yield unit


def finish(
    results: list[UnitResult], backend: str, device: str, seconds: float, args: argparse.Namespace
) -> int:
    """Write the reports."""
    from . import report as reports

    report = reports.build(backend, results, seconds, device)
    print(reports.text(report, args.verbose))
    if results and not any(r.cases for r in results):
        which = f"no case {args.case}" if args.case else "no case"
        print(f"{which} in {len(results)} units: nothing was checked")
        return 2
    if results and not args.backend and not any(r.kernels or r.library for r in results):
        print(f"no kernel and no library call of {args.vendor} ran on {device}: all that ran were externs")
    if args.json:
        reports.write_json(report, args.json)
    if args.junit:
        reports.write_junit(report, results, args.junit)
    if args.html:
        from .page import write_html

        write_html(report, args.html)
    if args.coverage:
        from .docs import write_coverage

        write_coverage(report, results, args.coverage)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())

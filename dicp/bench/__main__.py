"""Models under eager PyTorch, Inductor in its modes, and dicp, side by side.

    python -m dicp.bench                          time of a call: all models, both phases, both dtypes
    python -m dicp.bench --kinds steady,compile   and cold and warm compile, a fresh process each
    python -m dicp.bench --all                    and peak memory, and overhead per call
    python -m dicp.bench --models bert,llama-decode --phases inference --dtypes fp32
    python -m dicp.bench --models timm --phases inference         image models for which nothing was tuned
    python -m dicp.bench --models timm:densenet121,timm:swin_tiny_patch4_window7_224 --batch 2
    python -m dicp.bench --device cuda --batch 16 --dtypes bf16
    python -m dicp.bench --from results.json --markdown page.md    earlier figures in another form

Contestants take turns in one process, with equal weights and inputs; a figure is the median of at least 7
rounds. Where a peer is ahead of dicp, that is listed. The exit code is 1 if something failed, 2 if nothing
can be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from dicp.bench import contestants, report, run
from dicp.bench.models import obstacle, zoo
from dicp.bench.workloads import DTYPES, PHASES, STANDARD, WORKLOADS, Setting, known, workload

# What may be named beside those that are listed, and whether a name is one of those.
OTHERS = {
    "models": (known, f", or timm:NAME, any image model of timm, or timm, {len(zoo.SET)} of them"),
    "contestants": (contestants.known, ", or any backend of torch.compile"),
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Arguments, lists as lists; exits with 2 on names that do not exist."""
    parser = argparse.ArgumentParser(
        prog="python -m dicp.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    offered = {
        "models": (list(WORKLOADS), list(STANDARD)),
        "phases": (list(PHASES), list(PHASES)),
        "dtypes": (list(DTYPES), list(DTYPES)),
        "contestants": (list(contestants.CONTESTANTS), list(contestants.STANDARD)),
        "kinds": (list(run.KINDS), ["steady"]),
    }
    for name, (all_of_them, standard) in offered.items():
        default = "all" if all_of_them == standard else ",".join(standard)
        more = OTHERS.get(name, (None, ""))[1]
        if name == "contestants":
            default += f"; on a GPU {','.join(contestants.ON_GPU)}"
        parser.add_argument(
            f"--{name}",
            type=lambda text: text.split(","),
            default=None if name == "contestants" else standard,
            help=f"some of {', '.join(all_of_them)}{more} (default: {default})",
        )
    parser.add_argument("--all", action="store_true", help="every kind of figure")
    parser.add_argument("--rounds", type=int, default=7, help="alternating rounds (at least 7)")
    parser.add_argument(
        "--repeat", type=int, default=1, help="processes for a compile or memory figure (median)"
    )
    parser.add_argument("--size", default="full", choices=["full", "small"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="N times the usual batch")
    parser.add_argument("--channels-last", action="store_true", help="images and their models, for all")
    parser.add_argument("--threads", type=int, help="of torch, for all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="speed over eager (PNG); needs matplotlib")
    parser.add_argument("--from", dest="earlier", type=Path, metavar="FILE", help="figures that --json wrote")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    on_gpu = args.device == "cuda"
    args.models = [n for name in args.models for n in (_of_timm() if name == "timm" else [name])]
    args.contestants = args.contestants or list(contestants.ON_GPU if on_gpu else contestants.STANDARD)
    for name, (all_of_them, _) in offered.items():
        for given in getattr(args, name):
            if given not in all_of_them and not (name in OTHERS and OTHERS[name][0](given)):
                parser.error(f"--{name}: no {given!r}; there are: {', '.join(all_of_them)}")
    if args.rounds < 7 and args.size == "full":
        parser.error("--rounds: a figure is the median of at least 7")
    return args


def _of_timm() -> list[str]:
    return [zoo.PREFIX + name for name in zoo.SET]


def measure(args: argparse.Namespace) -> report.Results:
    """All that was asked for, each row said as soon as it is there."""
    kinds = run.KINDS if args.all else args.kinds
    settings = {"rounds": args.rounds, "repeat": args.repeat, "size": args.size}
    results: report.Results = {"machine": run.machine(), "settings": settings, "rows": []}
    print(report.heading(results), flush=True)
    for name in args.models:
        for phase in args.phases:
            for dtype in args.dtypes:
                if phase not in workload(name).phases:
                    continue
                setting = Setting(phase, dtype, args.size, args.channels_last, args.device, args.batch)
                job = run.Job("steady", name, setting, tuple(args.contestants), args.rounds)
                row = run.measure_row(kinds, job, args.repeat)
                results["rows"].append(row)
                told = ", ".join(f"{n} {_short(f)}" for n, f in row["contestants"].items())
                print(f"  {report.label(row)}: {told}", file=sys.stderr, flush=True)
                if args.json:
                    args.json.write_text(json.dumps(results, indent=1) + "\n")
    if "overhead" in kinds:
        setting = Setting(PHASES[0], next(iter(DTYPES)), args.size, device=args.device)
        job = run.Job("overhead", next(iter(WORKLOADS)), setting, tuple(args.contestants), args.rounds)
        results["overhead"] = run.in_process(job)
    return results


def _short(found: run.Figures) -> str:
    if "failed" in found:
        return "failed"
    return " ".join(f"{v:.2f} {k}" for k, v in found.items() if isinstance(v, float) and k != "difference")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.worker:
        print(json.dumps(run.work(run.Job.parse(args.worker))))
        return 0
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)  # for the workers
        torch.set_num_threads(args.threads)
    if args.earlier:
        results = json.loads(args.earlier.read_text())
    else:
        problem = obstacle({workload(name).case.name for name in args.models})
        if problem:
            print(f"error: {problem}", file=sys.stderr)
            return 2
        results = measure(args)
    print("\n" + report.text(results), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(report.markdown(results))
    problem = report.plot(results, args.plot) if args.plot else None
    if problem:
        print(f"error: {problem}", file=sys.stderr)
    failed = any("failed" in f for row in results["rows"] for f in row["contestants"].values())
    return 1 if failed or problem else 0


if __name__ == "__main__":
    sys.exit(main())

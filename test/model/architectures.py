"""Every architecture that a library knows, small and with random weights, under a backend: what a forward
and a backward compiled from it give is held to eager's by the rule of checks.py. Of transformers all of them,
shrunk; of timm a small one of nearly each file, at its own size, with gradients of training mode.

One process each, so that one that crashes or hangs is one line of the report. An architecture whose default
configuration cannot be made small, or whose call needs inputs that are not guessed here, is left out and says
why. Where results are random or there is no float64 run to compare with, only dtypes and ranks are compared.

    bash test/model/run_test_architectures.sh [REGEX] [backend] [--of timm] [--dynamic] [--jobs N]
        [--results FILE]

--results: lines of JSON; what is there already is not run again. timm has to be installed aside.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from model import checks
from model.arms import without_onednn
from model.libraries import LIBRARIES

SECONDS = 900  # for one architecture


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested results, by where they are."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(one, f"{path}.{key}")


def results(call: Callable[..., Any], model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Of an inference call."""
    with torch.no_grad():
        return dict(leaves(call(**inputs)))


def gradients(call: Callable[..., Any], model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Of the mean squares of all results, by parameter."""
    model.zero_grad()
    found = [t for _, t in leaves(call(**inputs)) if t.is_floating_point() and t.requires_grad]
    sum(t.square().mean() for t in found).backward()  # type: ignore[union-attr]
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def training_gradients(
    call: Callable[..., Any], model: nn.Module, inputs: dict[str, Any]
) -> dict[str, Tensor]:
    """`gradients` in training mode; the model, and its running statistics, are as before."""
    kept = {name: t.clone() for name, t in model.state_dict().items()}
    model.train()
    try:
        return gradients(call, model, inputs)
    finally:
        model.eval().load_state_dict(kept)


Run = Callable[[Callable[..., Any], nn.Module, dict[str, Any]], dict[str, Tensor]]


def examine(name: str, backend: str, dynamic: bool = False, of: str = "transformers") -> dict[str, Any]:
    """One line of the report."""
    found: dict[str, Any] = {"name": name, "status": "ok", "problems": []}
    start, library = time.perf_counter(), LIBRARIES[of]
    runs: dict[str, Run] = {
        "result": results,
        "gradient": training_gradients if library.trains else gradients,
    }
    try:
        model = library.build(name)
        inputs = library.inputs(model)
        eager = {what: run(model, model, inputs) for what, run in runs.items()}
    except Exception as error:  # whatever a model refuses its guessed inputs with
        return found | {"status": "left out", "problems": [f"{type(error).__name__}: {error}"[:300]]}
    true, why = exactly(model, inputs, runs, eager)
    if why:
        found["status"] = f"ok, values not compared ({why})"
    compiled = torch.compile(model, backend=backend, dynamic=dynamic or None)
    for what, run in runs.items():
        try:
            got = run(compiled, model, inputs)
        except Exception as error:  # any failure is a finding
            found["problems"].append(f"{what}: {type(error).__name__}: {error}"[:1500])
            continue
        if what not in true:
            found["problems"] += unlike(what, got, eager[what])
            continue
        kinks = what == "gradient"  # small models are full of routers and ReLUs
        problems = _unlike_exact(what, got, [eager[what]], true[what], kinks)
        if kinks and problems:  # the rule in full takes two more runs of eager
            ways = [eager[what], *other_ways(run, model, inputs)]
            problems = _unlike_exact(what, got, ways, true[what], kinks)
        found["problems"] += problems
    if found["problems"]:
        found["status"] = "FAIL"
    found["externs"] = {k[7:]: v for k, v in counters["dicp"].items() if k.startswith("extern:")}
    found["breaks"], found["seconds"] = sum(counters["graph_break"].values()), time.perf_counter() - start
    return found


def exactly(
    model: nn.Module, inputs: dict[str, Any], runs: dict[str, Run], eager: dict[str, dict[str, Tensor]]
) -> tuple[dict[str, dict[str, Tensor]], str]:
    """What the runs give in float64; and why some of them have nothing there to be compared with."""
    random = [what for what, run in runs.items() if not _same(eager[what], run(model, model, inputs))]
    tensors = checks.to_double({k: v for k, v in inputs.items() if isinstance(v, Tensor)})
    wide = {**inputs, **tensors}
    try:
        with checks.in_double():
            exact = checks.exact_copy(model)
            if hasattr(exact, "set_experts_implementation"):
                exact.set_experts_implementation("eager")  # the default's grouped product has no float64
            true = {what: run(exact, exact, wide) for what, run in runs.items() if what not in random}
    except Exception as error:  # some operators have no float64
        return {}, f"no float64: {error}"[:100]
    # a mask that is the least float32 leaves rows without a key in float64
    result = true.get("result", {})
    if any(t.isnan().any() and not eager["result"][k].isnan().any() for k, t in result.items()):
        return {}, "NaN in float64 alone"
    return true, f"random {' and '.join(random)}" if random else ""


def _unlike_exact(
    what: str, got: checks.Group, ways: Sequence[checks.Group], true: checks.Group, kinks: bool
) -> list[str]:
    return [str(v) for v in checks.judge_group(what, got, ways, true, kinks=kinks) if not v.ok]


def other_ways(run: Run, model: nn.Module, inputs: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
    """What eager gives with other layouts and with convolutions of its own (see checks.py)."""
    wide, last = copy.deepcopy(model).to(memory_format=torch.channels_last), torch.channels_last
    images = {k: v for k, v in inputs.items() if isinstance(v, Tensor) and v.dim() == 4}
    yield run(wide, wide, inputs | {k: v.contiguous(memory_format=last) for k, v in images.items()})
    with without_onednn():
        yield run(model, model, inputs)


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(t.nan_to_num(), other[k].nan_to_num()) for k, t in one.items()
    )


def unlike(what: str, got: dict[str, Tensor], eager: dict[str, Tensor]) -> list[str]:
    """Differences in what there is, and of which dtype and rank: sizes may be random too."""

    def kinds(run: dict[str, Tensor]) -> dict[str, str]:
        return {k: f"{t.dtype} of {t.dim()} dimensions" for k, t in run.items()}

    ours, theirs = kinds(got), kinds(eager)
    keys = sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
    return [f"{what} {k}: {ours.get(k)}, eager's {theirs.get(k)}" for k in keys[:5]]


def in_process(name: str, backend: str, dynamic: bool, of: str) -> dict[str, Any]:
    """`examine` in a process of its own."""
    command = [sys.executable, "-m", "model.architectures", "--one", name, backend, "--of", of]
    try:
        done = subprocess.run(
            command + ["--dynamic"] * dynamic, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"name": name, "status": "FAIL", "problems": [f"not done after {SECONDS} s"]}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"name"')]
    if lines:
        return json.loads(lines[-1])  # type: ignore[no-any-return]
    return {"name": name, "status": "FAIL", "problems": [f"exit {done.returncode}: {done.stderr[-1500:]}"]}


def line(found: dict[str, Any]) -> str:
    """As the report shows it."""
    externs = "".join(f"  extern {op} x{n}" for op, n in found.get("externs", {}).items())
    breaks = f"  {found['breaks']} graph breaks" if found.get("breaks") else ""
    return "\n    ".join([f"{found['name']:<28}{found['status']}{externs}{breaks}", *found["problems"]])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="run_test_architectures.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="?", default=".", help="a regular expression")
    parser.add_argument("backend", nargs="?", default="dicp_cpu")
    parser.add_argument("--of", choices=LIBRARIES, default="transformers", help="the library")
    parser.add_argument("--dynamic", action="store_true", help="sizes are symbolic")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        print(json.dumps(examine(args.names, args.backend, args.dynamic, args.of)), flush=True)
        os._exit(0)  # a model's own threads are not waited for
    if importlib.util.find_spec(args.of) is None:
        parser.error(f"--of {args.of}: it is not installed")
    known = args.results.read_text().splitlines() if args.results and args.results.exists() else []
    done = {found["name"]: found for found in map(json.loads, known)}
    names = LIBRARIES[args.of].matching(args.names)
    with ThreadPoolExecutor(args.jobs) as pool:
        todo = [n for n in names if n not in done]
        for found in pool.map(lambda n: in_process(n, args.backend, args.dynamic, args.of), todo):
            done[found["name"]] = found
            print(line(found), flush=True)
            if args.results:
                with args.results.open("a") as file:
                    file.write(json.dumps(found) + "\n")
    count = Counter(done[n]["status"].partition(" (")[0] for n in names)
    print(", ".join(f"{n} {status}" for status, n in count.most_common()))
    return 1 if count["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())

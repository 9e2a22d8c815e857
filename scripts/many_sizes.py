"""Many sizes of one model: compiles that they take, and each size's time against its own static compile.

    python scripts/many_sizes.py llama      4 layers: batches 1 to 64, lengths 1 to 2048, --tokens at most
    python scripts/many_sizes.py resnet50   batch 2, eight image sizes
Options: --tokens 2048  --rounds 5  --no-static (count compiles and check results only)  --json FILE

The model is compiled with `dynamic=True` and meets every size in turn; then each size is compiled alone
(`dynamic=False`), and the two are timed in turns. --auto: torch.compile's default instead, static first and
symbolic once a size changed.
"""

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from serving import Scores

from dicp.bench import measure
from dicp.bench.models import CASES
from dicp.compiler import observe

BATCHES = (2, 3, 4, 7, 8, 16, 32, 64, 1)
LENGTHS = (16, 7, 2, 5, 33, 64, 100, 128, 256, 512, 777, 1024, 2048, 1)
IMAGES = (224, 192, 160, 256, 128, 96, 288, 176)


def sizes_of(workload: str, tokens: int) -> list[tuple[int, ...]]:
    """Input shapes, those with a size of 1 last: torch compiles them apart."""
    if workload == "resnet50":
        return [(2, 3, n, n) for n in IMAGES]
    found = [s for s in itertools.product(BATCHES, LENGTHS) if math.prod(s) <= tokens]
    return sorted(found, key=lambda s: 1 in s)


def make_input(workload: str, shape: tuple[int, ...]) -> torch.Tensor:
    seed = torch.Generator().manual_seed(0)
    if workload == "resnet50":
        return torch.randn(shape, generator=seed)
    return torch.randint(0, 32000, shape, generator=seed)


def compiled(model: Any, **given: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="dicp_cpu", fullgraph=True, **given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("workload", choices=("llama", "resnet50"))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-static", action="store_true")
    parser.add_argument("--auto", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 1000
    name = "input_ids" if args.workload == "llama" else "x"
    model = Scores(CASES[args.workload].build("full"), name).eval()
    rows, graphs = [], []
    call = compiled(model, dynamic=None if args.auto else True)
    with torch.no_grad():
        sizes = sizes_of(args.workload, args.tokens)
        for shape in sizes:
            x = make_input(args.workload, shape)
            with observe(graphs.append):
                got = call(x)
            want = model(x)
            torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
            print(f"{shape}: {len(graphs)} compiles so far", flush=True)
        for shape in [] if args.no_static else sizes:
            x = make_input(args.workload, shape)
            torch._dynamo.reset()
            dynamic, static = compiled(model, dynamic=True), compiled(model, dynamic=False)
            dynamic(x), static(x)
            ms = measure.alternating([lambda: dynamic(x), lambda: static(x)], args.rounds)  # noqa: B023
            rows.append((shape, *ms))
            print(f"{shape}: {ms[0]:.2f} ms, own compile {ms[1]:.2f} ms, {ms[0] / ms[1]:.3f}", flush=True)
    plain = [shape for shape in sizes if 1 not in shape]
    print(f"{len(sizes)} sizes, {len(plain)} of them without a 1; {len(graphs)} compiles")
    if rows:
        ratios = [a / b for _, a, b in rows]
        print(
            f"time over own compile: geomean {statistics.geometric_mean(ratios):.3f}, worst {max(ratios):.3f}"
        )
    if args.json:
        Path(args.json).write_text(json.dumps({"compiles": len(graphs), "rows": rows}))


if __name__ == "__main__":
    main()

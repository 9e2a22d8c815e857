"""Many sizes of one model: compiles that they take, and each size's time against its own static compile.

    python scripts/many_sizes.py llama      4 layers: batches 1 to 64, lengths 1 to 2048, --tokens at most
    python scripts/many_sizes.py resnet50   batch 2, eight image sizes

The model meets every size in turn; then each size is compiled alone (`dynamic=False`), and the two are timed
in turns. How sizes become symbolic (--form):

  marked    mark_dynamic on each dimension; LLaMA's batch is marked unbacked, and the model given its tokens'
            positions (batch by length), since without them it asks itself whether the batch is 1
  dynamic   torch.compile(dynamic=True); torch compiles sizes of 1 apart
  auto      torch.compile's default: static first, symbolic once a size changed
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
from torch._dynamo.utils import counters

from dicp.bench import measure
from dicp.bench.models import CASES

BATCHES = (2, 3, 4, 7, 8, 16, 32, 64, 1)
LENGTHS = (16, 7, 2, 5, 33, 64, 100, 128, 256, 512, 777, 1024, 2048, 1)
IMAGES = (224, 192, 160, 256, 128, 96, 288, 176)


class Positioned(torch.nn.Module):
    """A decoder that is given its tokens' positions."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        return self.model(input_ids=ids, position_ids=positions).logits


def sizes_of(workload: str, tokens: int, longest: int) -> list[tuple[int, ...]]:
    """Input shapes, those with a size of 1 last: torch compiles them apart."""
    if workload == "resnet50":
        return [(2, 3, n, n) for n in IMAGES]
    found = [s for s in itertools.product(BATCHES, LENGTHS) if math.prod(s) <= tokens and s[1] <= longest]
    return sorted(found, key=lambda s: 1 in s)


def model_of(args: argparse.Namespace) -> torch.nn.Module:
    model = CASES[args.workload].build(args.size)
    if args.workload == "resnet50":
        return model.eval()
    if args.layers:
        model.model.layers = model.model.layers[: args.layers]
        model.config.num_hidden_layers = args.layers
    return (Positioned(model) if args.form == "marked" else Scores(model, "input_ids")).eval()


def input_of(args: argparse.Namespace, shape: tuple[int, ...], vocabulary: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(0)
    if args.workload == "resnet50":
        return torch.randn(shape, generator=seed)
    return torch.randint(0, vocabulary, shape, generator=seed)


def mark(args: argparse.Namespace, x: torch.Tensor) -> torch.Tensor:
    """The same values, with the sizes marked symbolic under --form marked."""
    if args.form != "marked":
        return x
    marked = x.detach().view(x.shape)
    torch._dynamo.decorators.mark_unbacked(marked, 0)
    for d in (2, 3) if args.workload == "resnet50" else (1,):
        if x.shape[d] > 1:
            torch._dynamo.mark_dynamic(marked, d)
    return marked


def compiled(args: argparse.Namespace, model: torch.nn.Module, dynamic: bool | None) -> Callable[..., Any]:
    return torch.compile(model, backend=args.backend, fullgraph=True, dynamic=dynamic)


def count_compiles(args: argparse.Namespace, model: torch.nn.Module, cases: dict[Any, torch.Tensor]) -> int:
    """Run every size through one compiled function, each result checked; the graphs it took."""
    call = compiled(args, model, dynamic=True if args.form == "dynamic" else None)
    before = counters["stats"]["unique_graphs"]
    for shape, x in cases.items():
        got = call(mark(args, x))
        torch.testing.assert_close(got, model(x), rtol=2e-3, atol=2e-3)
        print(f"{shape}: {counters['stats']['unique_graphs'] - before} graphs so far", flush=True)
    return counters["stats"]["unique_graphs"] - before


def compare(args: argparse.Namespace, model: torch.nn.Module, cases: dict[Any, torch.Tensor]) -> list[Any]:
    """(shape, ms, ms of its own compile) of every size."""
    rows = []
    symbolic = compiled(args, model, dynamic=True if args.form == "dynamic" else None)
    for x in cases.values():
        symbolic(mark(args, x))
    for shape, x in cases.items():
        static = compiled(args, alone(model), dynamic=False)
        static(x)
        ms = measure.alternating([lambda: symbolic(x), lambda: static(x)], args.rounds, args.min_ms)  # noqa: B023
        rows.append((shape, *ms))
        print(f"{shape}: {ms[0]:.3f} ms, own compile {ms[1]:.3f} ms, {ms[0] / ms[1]:.3f}", flush=True)
    return rows


def alone(model: torch.nn.Module) -> torch.nn.Module:
    """The model in a module with code of its own, so that what is compiled for one size is not looked at for
    another."""
    scope: dict[str, Any] = {"torch": torch}
    exec("class Alone(torch.nn.Module):\n    def forward(self, x): return self.model(x)", scope)
    module = scope["Alone"]()
    module.model = model
    return module  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("workload", choices=("llama", "resnet50"))
    parser.add_argument("--backend", default="dicp_cpu")
    parser.add_argument("--form", default="marked", choices=("marked", "dynamic", "auto"))
    parser.add_argument("--size", default="full", choices=("full", "small"))
    parser.add_argument("--layers", type=int, help="of LLaMA, instead of all")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--longest", type=int, default=2048, help="LLaMA's longest input")
    parser.add_argument("--sample", type=int, help="so many of the sizes, spread evenly")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--min-ms", type=float, default=20.0, help="milliseconds of a turn, at least")
    parser.add_argument("--only", choices=("compiles", "times"))
    parser.add_argument("--json")
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 1000
    model = model_of(args)
    vocabulary = 32000 if args.size == "full" else 512
    sizes = sizes_of(args.workload, args.tokens, args.longest)
    if args.sample and args.sample < len(sizes):
        sizes = [sizes[k * len(sizes) // args.sample] for k in range(args.sample)]
    cases = {shape: input_of(args, shape, vocabulary) for shape in sizes}
    graphs, rows = None, []
    with torch.no_grad():
        if args.only != "times":
            graphs = count_compiles(args, model, cases)
            plain = sum(1 not in shape for shape in sizes)
            print(f"{len(sizes)} sizes, {plain} of them without a 1; {graphs} graphs compiled")
        if args.only != "compiles":
            rows = compare(args, model, cases)
            ratios = [a / b for _, a, b in rows]
            worst = max(rows, key=lambda r: r[1] / r[2])
            mean = statistics.geometric_mean(ratios)
            print(f"time over own compile: geomean {mean:.3f}, worst {max(ratios):.3f} at {worst[0]}")
    if args.json:
        Path(args.json).write_text(json.dumps({"graphs": graphs, "rows": rows}))


if __name__ == "__main__":
    main()

"""How long calls take that serve the same node, measured in turns."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import size_hint

COLD_BYTES = 64 << 20
"""Operands change from call to call until that much was read: a model's weights come from memory, where the
same ones again and again would come from a cache."""
ROUNDS = 7  # at the least, where the budget allows
AGREEING = 1.05
"""A candidate's second least time over its least: rounds go on while one's is above, since others' work may
have slowed all but one of its samples, or every one."""
SAMPLE_S = 1e-3  # a sample is at least that long, so that the clock and the call from Python count little
MOST_CALLS = 256  # of a sample: what waits in a GPU's queue is limited
BUDGET_S = 1.0  # for one node; three rounds at the least

ALIKE = 0.1  # of the largest element: by far more than the rounding of any dtype
_OF_THE_FORWARD = frozenset("out output result logsumexp mean rstd save_mean save_invstd".split())

Run = Callable[[list[Any]], Any]
Elapsed = Callable[[Callable[[], None]], float]


def on_host(work: Callable[[], None]) -> float:
    """Seconds until `work` returns."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def operand_sets(gm: fx.GraphModule) -> list[list[torch.Tensor]]:
    """Inputs for a graph, several times over where they would all stay in a cache."""
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    vals = [n.meta["val"] for n in inputs]
    nbytes = sum(_extent(v) * v.element_size() for v in vals) or 1
    copies = min(max(math.ceil(COLD_BYTES / nbytes), 1), 256)
    generator = torch.Generator().manual_seed(0)
    return [[_filled(n, generator) for n in inputs] for _ in range(copies)]


def agree(call: fx.Node, one: Any, other: Any) -> bool:
    """Whether candidates gave the same first result for `operand_sets`, as far as rounding goes: this finds
    calls that compute something else, not inexact ones. True where that cannot be told: the operands of some
    gradients are what the forward made, where these are any numbers."""
    schema = getattr(call.target, "_schema", None)
    named = {a.name for a in schema.arguments[: len(call.args)]} if schema else set()
    a, b = (next((t for t in results if isinstance(t, torch.Tensor)), None) for results in (one, other))
    if a is None or b is None or named & _OF_THE_FORWARD:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point or not a.numel():
        return True
    most = float(a.abs().max())
    pieces = zip(a.reshape(-1).split(1 << 20), b.reshape(-1).split(1 << 20), strict=True)
    off = max(float((p.double() - q.double()).abs().max()) for p, q in pieces)
    return off <= ALIKE * most or not math.isfinite(most)


def _extent(val: torch.Tensor) -> int:
    """Elements from the first to the last."""
    if 0 in val.shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(val.shape, val.stride(), strict=True))


def _filled(node: fx.Node, generator: torch.Generator) -> torch.Tensor:
    """A tensor of that shape, dtype and layout with small numbers, none of them subnormal; or the ends of
    groups of equal size."""
    val = node.meta["val"]
    flat = torch.empty(_extent(val), dtype=val.dtype)
    if val.dtype.is_floating_point:
        flat.uniform_(-1, 1, generator=generator)
    elif (shared := _shared_out(node)) is not None:
        flat.copy_(torch.arange(1, len(flat) + 1) * shared // len(flat))
    else:
        flat.fill_(1)
    return flat.to(val.device).as_strided(val.shape, val.stride())


def _shared_out(node: fx.Node) -> int | None:
    """How many rows, or columns, the groups share out whose ends an operand of a product of groups tells."""
    for user in node.users:
        schema = getattr(user.target, "_schema", None)
        names = [a.name for a in schema.arguments[: len(user.args)]] if schema else []
        if "offs" in names and user.args[names.index("offs")] is node:
            x, w = (a.meta["val"] for a in user.args[:2])  # type: ignore[union-attr]
            return size_hint(x.shape[0] if w.dim() == 3 else x.shape[-1])
    return None


def time_calls(
    calls: Mapping[str, Run], sets: list[list[torch.Tensor]], elapsed: Elapsed = on_host
) -> dict[str, float]:
    """Seconds a call, by name: the least of alternating rounds, since what else runs here only adds to it.
    elapsed: how long what a function does takes (Vendor.clock)."""

    def sample(run: Run, start: int, count: int) -> float:
        def work() -> None:
            for k in range(start, start + count):
                run(list(sets[k % len(sets)]))

        return max(elapsed(work), 1e-9) / count

    counts = {}
    for name, run in calls.items():
        sample(run, 0, 1)  # the first call of a library prepares what later ones reuse
        counts[name] = min(max(math.ceil(SAMPLE_S / sample(run, 1, 1)), 1), MOST_CALLS)
    found: dict[str, list[float]] = {name: [] for name in calls}
    begun = time.perf_counter()
    for number in itertools.count():
        enough = number >= ROUNDS and all(_agrees(samples) for samples in found.values())
        if enough or number >= 3 and time.perf_counter() - begun > BUDGET_S:
            break
        for name, run in calls.items():
            found[name].append(sample(run, number * counts[name], counts[name]))
    return {name: min(samples) for name, samples in found.items()}


def _agrees(samples: list[float]) -> bool:
    """Whether the least of the samples is no single one."""
    least, second = sorted(samples)[:2]
    return second <= AGREEING * least

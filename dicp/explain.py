"""What dicp makes of a model: graphs, breaks, kernels with what they fuse, externs, memory, time by phase.

import dicp; print(dicp.explain(model, x))          or: python -m dicp.explain package.module:function
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from dicp.compiler import Compiled, observe
from dicp.schedule.defs import Call


@dataclass
class GraphReport:
    """One compiled graph. Times in seconds, memory in bytes (text where sizes are symbolic)."""

    name: str
    role: str
    kernels: list[dict[str, Any]]
    library: list[str]
    externs: list[str]
    arena: int  # bytes, as the next at the sizes of the example
    most_alive: int
    saved_in_place: int
    borrowed: int  # temporaries that lie in a result until it is written
    seconds: dict[str, float]
    built: int
    from_cache: int
    folded: list[str] = field(default_factory=list)
    folded_bytes: int = 0
    weights_checked: int = 0


@dataclass
class Explanation:
    """The result of `explain`; prints as a report, `to_dict` for tools."""

    graphs: list[GraphReport] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    total_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{_several(len(self.graphs), 'graph')}, {_several(len(self.breaks), 'graph break')}, "
            f"first call {self.total_seconds:.2f} s"
        ]
        lines += [f"  break: {b}" for b in self.breaks]
        if not self.graphs:
            lines.append("  no graph came to dicp: Dynamo left all to eager, or the backend is another's")
        for g in self.graphs:
            lines.append("")
            counts = (g.kernels, "kernel"), (g.library, "library call"), (g.externs, "extern")
            lines.append(f"{g.name}: {', '.join(_several(len(found), what) for found, what in counts)}")
            for k in g.kernels:
                lines.append(f"  kernel {k['name']}  x{k['launches']}  {k['space']}")
                lines += [f"      {o}" for o in k["fuses"]]
            lines += [f"  library {text}" for text in _counted(g.library)]
            lines += [f"  EXTERN {text}" for text in _counted(g.externs)]
            if g.folded:
                lines.append(
                    f"  frozen: {len(g.folded)} values made of {g.weights_checked} weights, "
                    f"{g.folded_bytes} bytes"
                )
                lines += [f"      {text}" for text in _counted(g.folded)]
            lines.append(
                f"  memory: arena {g.arena} bytes, most alive at once {g.most_alive}, "
                f"{g.saved_in_place} results in place of an operand, "
                f"{g.borrowed} temporaries in memory of a result"
            )
            lines.append(
                "  time: "
                + ", ".join(f"{k} {v:.3f} s" for k, v in g.seconds.items())
                + f" ({g.built} units built, {g.from_cache} from the cache)"
            )
        return "\n".join(lines)


def explain(
    model: Callable[..., Any],
    *args: Any,
    backend: str = "dicp",
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Compile and run `model(*args, **kwargs)` once, and tell what was made of it.

    When a floating result requires a gradient, the backward is run too (of the sum of such results). As in
    training, that adds to `.grad`, and modules in training mode update their running statistics. What Dynamo
    compiled before is dropped.
    """
    import torch

    from dicp import compat

    found: list[Compiled] = []
    compat.reset_dynamo()
    before = compat.graph_break_count()
    start = time.perf_counter()
    with observe(found.append):
        result = torch.compile(model, backend=backend, options=options)(*args, **kwargs)
        leaves = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        wanting = [t for t in leaves if t.requires_grad and t.is_floating_point()]
        if wanting:
            sum((t.sum() for t in wanting), torch.zeros(())).backward()  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - start
    return Explanation([report(c) for c in found], compat.graph_breaks(before), seconds)


def report(compiled: Compiled) -> GraphReport:
    """The facts of one compiled graph."""
    program = compiled.program
    kernels: dict[str, dict[str, Any]] = {}
    names = program.kernel_names()
    for launch in program.launches:
        entry = kernels.setdefault(
            launch.kernel.digest,
            {
                "name": names[launch.kernel.digest],
                "launches": 0,
                "space": ", ".join(f"{a.size}{' reduced' if a.reduced else ''}" for a in launch.kernel.axes)
                or "one element",
                "fuses": list(launch.kernel.origins),
            },
        )
        entry["launches"] += 1
    plan = program.plan
    folding, constants = compiled.folding, compiled.constants
    stats = [program.build_stats] + ([] if constants is None else [constants.program.build_stats])
    once = [] if constants is None else [f"{_extern(c)}    (once)" for c in constants.program.externs]
    return GraphReport(
        compiled.name,
        compiled.role,
        list(kernels.values()),
        [f"{c.claim.name}    {c.note}" for c in program.library_calls],
        [_extern(c) for c in program.externs] + once,
        plan.example_size,
        plan.lower_bound,
        len(plan.root),
        len(plan.borrowed),
        compiled.seconds,
        sum(s.compiled for s in stats),
        sum(s.hits for s in stats),
        list(folding.texts) if folding is not None else [],
        folding.nbytes if folding is not None else 0,
        len(folding.frozen) if folding is not None else 0,
    )


def _extern(call: Call) -> str:
    return call.note + (f"    ({call.why})" if call.why else "")


def _several(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _counted(lines: list[str]) -> list[str]:
    counts: dict[str, int] = {}
    for line in lines:
        counts[line] = counts.get(line, 0) + 1
    return [f"{line}  x{n}" if n > 1 else line for line, n in counts.items()]


def main(argv: list[str] | None = None) -> int:
    """`python -m dicp.explain module:function [--backend B] [--json]`: the function takes no arguments and
    returns (model, args)."""
    import argparse
    import importlib
    import json
    import os
    import sys

    parser = argparse.ArgumentParser(prog="python -m dicp.explain", description=main.__doc__)
    parser.add_argument("source", help="module:function returning (model, args)")
    parser.add_argument("--backend", default="dicp")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    module, _, name = given.source.partition(":")
    sys.path.insert(0, os.getcwd())
    model, args = getattr(importlib.import_module(module), name or "example")()
    found = explain(model, *args, backend=given.backend)
    print(json.dumps(found.to_dict(), indent=2) if given.json else found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Measure how Inductor takes each operator, and write `inductor.csv`: the second column of the report.

python -m dicp.conformance.inductor

A few minutes; nothing is built, lowering is all that is asked of Inductor.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from . import cases, opdb
from .outcome import call
from .unit import SEED, Runner, first_line

ORDER = (torch.float32, torch.int64, torch.bool, torch.uint8, torch.bfloat16, torch.complex64)


class Lowered(Exception):
    """Raised in place of code generation: what was wanted is known."""


@contextmanager
def _recording(found: list[tuple[str, str]]) -> Iterator[None]:
    """Collect (kind, name) of each lowered operation and stop before code generation."""
    from torch._inductor import graph, ir

    def stop(self: Any, *_: Any) -> None:
        for op in self.operations:
            if isinstance(op, ir.FallbackKernel):
                found.append(("fallback", str(op.op_overload)))
            elif isinstance(op, ir.ExternKernel):
                found.append(("library", str(getattr(op, "op_overload", None) or type(op).__name__)))
            else:
                found.append(("generated", type(op).__name__))
        raise Lowered

    with (
        mock.patch.object(graph.GraphLowering, "codegen", stop),
        mock.patch.object(graph.GraphLowering, "codegen_with_cpp_wrapper", stop),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        yield


def measure(op: opdb.Operator) -> tuple[str, str]:
    """(how, names): generated | library | fallback | eager (no graph) | fails, and what it falls back to."""
    dtype = next((d for d in ORDER if d in op.dtypes), None) or next(iter(op.dtypes), None)
    if dtype is None:
        return "", ""
    runner = Runner("inductor", op, "forward", False)
    group = []
    for case in cases.build(op, dtype, "forward", 8, False):
        if case.id.startswith("s") and ":" not in case.id and case.id[1:].isdigit():
            try:
                call(op, case, runner.fresh(case), False, SEED)
            except Exception:  # what eager refuses is no case
                continue
            group.append(case)
    found: list[tuple[str, str]] = []
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with _recording(found):
        try:
            if group:
                runner.compiled(group)
        except Exception as e:  # Lowered comes wrapped by Dynamo; all else is Inductor failing
            if "Lowered" not in str(e) and not isinstance(e.__cause__, Lowered):
                return "fails", first_line(e)[:120]
    if not found:
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
        return ("generated" if graphs else "eager"), ""
    kinds = {k for k, _ in found}
    how = next(k for k in ("fallback", "library", "generated") if k in kinds)
    return how, " ".join(sorted({n for k, n in found if k == "fallback"}))


def main() -> int:
    """Write the table beside this file."""
    from .worker import quiet

    quiet()
    with (Path(__file__).parent / "inductor.csv").open("w", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(["operator", "how", "fallbacks"])
        for op in opdb.operators().values():
            out.writerow([op.name, *measure(op)])
            f.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

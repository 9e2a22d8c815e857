"""The whole way from an FX graph to a callable, on one page."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from dicp.ir.verify import verify
from dicp.ops.library import register
from dicp.passes import run_passes
from dicp.runtime.dump import Dump
from dicp.runtime.parts import assemble_parts
from dicp.runtime.program import Program, make_program
from dicp.runtime.progress import Progress
from dicp.schedule.fuse import fuse
from dicp.schedule.kernels import build_kernels
from dicp.schedule.lower import lower
from dicp.schedule.memory import plan_memory
from dicp.schedule.partition import partition
from dicp.vendor.base import takes_graphs

_numbers = itertools.count()
_observers: list[Callable[[Compiled], None]] = []


@dataclass(eq=False)
class Compiled:
    """A compiled graph, and what `explain` tells of it."""

    name: str
    role: str
    call: Callable[[list[Any]], Any]
    program: Program
    seconds: dict[str, float] = field(default_factory=dict)


def compile_graph(gm: fx.GraphModule, vendor: Any, config: Any, role: str = "inference") -> Compiled:
    """Compile an aten graph (functional, with fake values in meta["val"]) for a vendor.

    role: inference, forward or backward, for names and reports.
    Raises UnsupportedOp (strict mode), BuildError, ToolchainError, VerifyError.
    """
    register()
    name = f"graph{next(_numbers)}_{role}"
    with Progress(name) as progress:
        compiled = _compile(gm, vendor, config, role, name, progress)
    for observer in list(_observers):
        observer(compiled)
    return compiled


def _compile(
    gm: fx.GraphModule, vendor: Any, config: Any, role: str, name: str, progress: Progress
) -> Compiled:
    seconds: dict[str, float] = {}
    dump = Dump(name, config)
    step = _timer(seconds, progress)
    dump.graph("00_import", gm)
    with step("passes"):
        gm = run_passes(gm, vendor, config, dump.on_pass)
    if config.verify:
        verify(gm)
    if takes_graphs(vendor):
        with step("partition"):
            parts = partition(gm, lambda node: vendor.supports(node.target, node))
        with step("build"):
            program, call = assemble_parts(name, gm, parts, vendor, config)
        return _done(Compiled(name, role, call, program, seconds), dump)
    with step("lower"):
        lowered = lower(gm, vendor, config)
    dump.definitions("20_lowered", lowered)
    with step("fuse"):
        steps = fuse(lowered)
    with step("kernels"):
        items = build_kernels(steps, lowered)
    dump.items("30_kernels", items)
    with step("memory"):
        plan = plan_memory(items, lowered)
    program = make_program(name, lowered, items, plan, owns_inputs=role == "backward")
    dump.plan("40_memory", program)
    with step("build"):
        call = vendor.assemble(program, config)
    return _done(Compiled(name, role, call, program, seconds), dump)


def _done(compiled: Compiled, dump: Dump) -> Compiled:
    dump.sources(compiled.program)
    dump.done(compiled)
    return compiled


@contextlib.contextmanager
def observe(observer: Callable[[Compiled], None]) -> Iterator[None]:
    """Call `observer` with every graph compiled inside."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def watched() -> bool:
    """Whether somebody observes compiles, so that results must come from one and not from a cache."""
    return bool(_observers)


def _timer(
    seconds: dict[str, float], progress: Progress
) -> Callable[[str], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def step(name: str) -> Iterator[None]:
        progress.step = name
        start = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - start

    return step

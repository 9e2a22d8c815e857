"""From a Program to a callable: emit kernels and segments, build them in parallel, load and bind."""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dicp.config import Config
from dicp.ir.kernel import Kernel
from dicp.runtime.failure import check_failure
from dicp.runtime.program import Program, Segment
from dicp.runtime.runner import NativeSegment, Runner
from dicp.schedule.defs import Call, Lowered, View
from dicp.schedule.kernels import Launch
from dicp.schedule.memory import MemoryPlan
from dicp.vendor.asking import emitted
from dicp.vendor.cpu_graph import codegen, toolchain
from dicp.vendor.cpu_graph.build import Build, Library, Unit
from dicp.vendor.cpu_graph.idioms import shortened
from dicp.vendor.cpu_graph.launching import bind, get_launcher
from dicp.vendor.cpu_graph.outlining import Emitted, outline
from dicp.vendor.cpu_graph.saved import save
from dicp.vendor.cpu_graph.segment import SegmentWriter, unit_source
from dicp.vendor.cpu_graph.timing import report_at_exit

# A compiler's start costs as much as compiling three or four kernels: few units, but enough to share out.
UNITS, LEAST, MOST = 4, 4, 16
_INCLUDED = re.compile(r'#include "(.*)"')


@contextlib.contextmanager
def begin(lowered: Lowered, config: Config) -> Iterator[Build]:
    """A build that compiles the templates of the calls, which need no memory plan, while the core makes that.
    What still runs when it is left is killed."""
    calls = [d for d in lowered.defs if isinstance(d, Call) and d.claim is not None]
    launcher = threading.Thread(target=get_launcher, args=(config,))  # once per machine: beside the kernels
    launcher.start()
    try:
        with Build(config) as build:
            # a long header takes long: it goes first, so that workers end at the same time
            build.begin(sorted(_templates(calls).values(), key=_length_of_header, reverse=True))
            yield build
    finally:
        launcher.join()


def _length_of_header(unit: Unit) -> int:
    """Of what a template includes first."""
    found = _INCLUDED.search(unit.source)
    return (toolchain.INCLUDE / found[1]).stat().st_size if found else 0


def _templates(calls: Sequence[Call]) -> dict[str, Unit]:
    """By function the templates that calls are of, whatever their memory will be. Of calls that
    look alike the first speaks for all: what it does not name, `finish` builds."""
    writer = SegmentWriter("unplanned", MemoryPlan(), {}, ())
    seen: set[str] = set()
    for call in calls:
        likeness = _likeness(call)
        if likeness not in seen:
            seen.add(likeness)
            writer.write(call)
    return writer.templates


def _likeness(call: Call) -> str:
    """What a call has in common with those of other layers."""

    def of(x: Any) -> Any:
        if isinstance(x, View):
            return x.shape, x.strides, x.buffer.dtype, x.buffer.kind
        if isinstance(x, (list, tuple)):
            return [of(item) for item in x]
        return {k: of(item) for k, item in x.items()} if isinstance(x, dict) else x

    return repr((call.claim.name, call.node.target, of((call.args, call.kwargs))))


def assemble(program: Program, config: Config) -> Callable[[list[Any]], Any]:
    """The function that runs the program. Raises BuildError, ToolchainError, NoCompileError."""
    names = program.kernel_names()
    writers = [
        (step, _segment(program, step, names, config.debug >= 2))
        for step in program.steps
        if isinstance(step, Segment)
    ]
    n_checks = len(program.lowered.checks)
    templates = {name: unit for _, writer in writers for name, unit in writer.templates.items()}
    segments = []
    if writers:
        lines = tuple(dict.fromkeys(line for step, _ in writers for line in _lines(step)))
        source = unit_source([writer for _, writer in writers], n_checks)
        segments = [Unit(f"{program.name}_segments", source, lines, effort="none")]
    build: Build = program.begun
    build.submit([*templates.values(), *segments])  # while kernels are written
    units = [*templates.values(), *kernel_units(program, config), *segments]
    program.sources = {f"{u.name}.cpp": u.source for u in units}
    library = build.finish(units)
    natives = {step.number: _native(writer, library, program, units[-1], config) for step, writer in writers}
    runner = Runner(program, natives)
    call = runner.function()
    program.sources["call.py"] = runner.source
    program.build_stats = library.stats
    if config.debug < 2:  # timed code reports to this process
        program.save = lambda: save(runner, [(s.number, w) for s, w in writers], library, config)
    return call


def kernel_units(program: Program, config: Config) -> list[Unit]:
    """The translation units; equal kernels are emitted once."""
    lanes = toolchain.lanes(config)
    prepared = (lambda kernel: kernel) if config.numerics == "eager" else shortened

    def write(kernel: Kernel, name: str) -> Emitted:
        return Emitted(name, codegen.emit(prepared(kernel), name, lanes), kernel.origins)

    texts = outline(list(emitted(program, write).values()))
    units = []
    size = min(MOST, max(LEAST, -(-len(texts) // UNITS)))
    for k in range(0, len(texts), size):
        chunk = texts[k : k + size]
        source = "\n\n".join([PRELUDE, *(t.text for t in chunk)])
        lines = tuple(dict.fromkeys(o for t in chunk for o in t.origins))
        units.append(Unit("_".join(["kernels", chunk[0].name]), source + "\n", lines, effort="exact"))
    return units


PRELUDE = '#include "dicp_kernel.h"\nusing namespace dicp;'


def _lines(step: Segment) -> tuple[str, ...]:
    """The user's lines that a segment comes from."""
    notes = [n for i in step.items for n in (i.kernel.origins if isinstance(i, Launch) else (i.note,))]
    return tuple(dict.fromkeys(notes))


def _segment(program: Program, step: Segment, names: dict[str, str], timed: bool) -> SegmentWriter:
    writer = SegmentWriter(
        f"segment{step.number}", program.plan, names, [v.name for v in program.sizes], timed, step.late
    )
    for k, item in enumerate(step.items):
        writer.write(item)
        writer.free([root for root in step.frees.get(k, []) if root not in program.plan.spilled])
    writer.keep(step.kept)
    return writer


def _native(
    writer: SegmentWriter, library: Library, program: Program, unit: Unit, config: Config
) -> NativeSegment:
    addresses = [library.address(program_name) for program_name in writer.kernels]
    loaded = {u.source: h for u, h in library.units}[unit.source]

    def address(symbol: str) -> int:
        found = ctypes.cast(getattr(loaded, symbol), ctypes.c_void_p).value
        assert found is not None
        return found

    if writer.timed:
        report_at_exit(program.name, writer.labels, address(f"{writer.name}_times"))
    bind(address(f"{writer.name}_bind"), len(addresses), config)(*addresses)
    run = bind(address(writer.name), writer.argument_count, config)
    return NativeSegment(
        run,
        writer.arguments,
        writer.uses_arena,
        writer.kept,
        writer.slots,
        check_failure(program.lowered.checks, writer.calls),
    )


__all__ = ["assemble", "kernel_units"]

"""Saving a program of this vendor, and loading it where there may be no compiler."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dicp.config import Config
from dicp.errors import CacheError, DicpError
from dicp.runtime.artifact import Artifact, NotSaveable, SavedUnit
from dicp.runtime.cache import open_store
from dicp.vendor.cpu_graph import toolchain
from dicp.vendor.cpu_graph.build import LIBRARY
from dicp.vendor.cpu_graph.launching import bind, launcher_folder

if TYPE_CHECKING:  # a process that only loads has no use for what writes code
    from dicp.runtime.runner import Runner
    from dicp.vendor.cpu_graph.build import Library
    from dicp.vendor.cpu_graph.segment import SegmentWriter


@dataclass(frozen=True)
class SavedSegment:
    """A native function: its unit and symbol, the kernels it calls as (unit, symbol), its arguments' number.
    """

    unit: int
    symbol: str
    kernels: tuple[tuple[int, str], ...]
    count: int


def save(
    runner: Runner, writers: Sequence[tuple[int, SegmentWriter]], library: Library, config: Config
) -> Artifact:
    """The artifact of a program whose function has been written. Raises NotSaveable.

    writers: (segment number, its writer); their unit is the last of the library.
    """
    last = len(library.units) - 1
    home = {}  # kernel function -> unit
    for k, (unit, _) in enumerate(library.units[:last]):
        home.update({name: k for _, w in writers for name in w.kernels if f" {name}(" in unit.source})
    natives = {
        f"native{number}": SavedSegment(
            last,
            writer.name,
            tuple((home[name], name) for name in writer.kernels),
            writer.argument_count,
        )
        for number, writer in writers
    }
    units = [SavedUnit.of(folder, (LIBRARY,)) for folder in library.folders]
    with contextlib.suppress(DicpError, ImportError, NotSaveable):  # without it calls go through ctypes
        units.append(SavedUnit.of(launcher_folder(config), (LIBRARY,)))
    words = toolchain.cpu_words(toolchain.flags(config, units[0].key.parts["compiler"])) if units else ()
    name, requires = runner.program.name, {"cpu": " ".join(words)}
    return Artifact.of(name, runner.source, runner.globals, "cpu_graph", natives, tuple(units), requires)


def load(artifact: Artifact, config: Config) -> Callable[[list[Any]], Any]:
    """The function of a saved program, over the shared objects that it brings along.

    Raises CacheError where this CPU cannot run them.
    """
    lacking = set(artifact.requires["cpu"].split()) - toolchain.cpu_flags()
    if lacking:
        raise CacheError(
            f"a saved program needs a CPU with {', '.join(sorted(lacking))}, which this one lacks",
            todo="save it on a machine like this one, or with options={'isa': 'avx2'} or 'portable'",
        )
    store = open_store(config)
    paths = [unit.place(store) / LIBRARY for unit in artifact.units]
    used = {n for s in artifact.natives.values() for n in (s.unit, *(k for k, _ in s.kernels))}
    loaded = {n: ctypes.CDLL(str(paths[n]), mode=os.RTLD_NOW | os.RTLD_LOCAL) for n in used}

    def address(unit: int, symbol: str) -> int:
        found = ctypes.cast(getattr(loaded[unit], symbol), ctypes.c_void_p).value
        assert found is not None
        return found

    natives = {}
    for name, segment in artifact.natives.items():
        kernels = [address(*kernel) for kernel in segment.kernels]
        bind(address(segment.unit, f"{segment.symbol}_bind"), len(kernels), config)(*kernels)
        natives[name] = bind(address(segment.unit, segment.symbol), segment.count, config)
    return artifact.function(natives)

"""A compiled graph as bytes: what another process needs to call it, without the compiler and without the
graph.

    requires    torch, dicp and machine that the code was made for; checked before anything is loaded
    source      the Python function of the program
    values      its globals, pickled; what has to be loaded, not copied, stands there by name
    natives     the vendor's own record of each native function (`Vendor.load` turns it into a callable)
    units       the shared objects, each under the key that it has in the build cache
    constants   where weights are frozen, the program that computes what depends on them alone; of weights
                themselves an artifact holds nothing
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import io
import pickle
import platform
import sys
import types
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload

import dicp
from dicp.compat import higher_order_name
from dicp.config import Config
from dicp.errors import CacheError
from dicp.ops.library import register
from dicp.passes.freeze import Folding
from dicp.runtime.arena import ARENA
from dicp.runtime.cache import Store, open_store
from dicp.runtime.entry import Key, content_hash, read_meta
from dicp.runtime.function import OWN_GLOBALS, make_function
from dicp.runtime.pool import POOL

SOURCES = (".py", ".c", ".h", ".cpp", ".hpp", ".cu", ".csv")
SINGLETONS: dict[str, Any] = {"ARENA": ARENA, "POOL": POOL}
"""One per process: named in a pickle, not copied."""


class NotSaveable(CacheError):
    """A program holds something that means nothing in another process."""


@dataclasses.dataclass(frozen=True)
class SavedUnit:
    """One entry of the build cache, without its source."""

    key: Key
    label: str
    files: Mapping[str, bytes]  # name -> content, compressed

    @staticmethod
    def of(folder: Path, names: tuple[str, ...]) -> SavedUnit:
        """Take the named files of an entry along. NotSaveable where they are gone."""
        meta = read_meta(folder)
        try:
            files = {n: zlib.compress((folder / n).read_bytes(), 1) for n in names}
        except OSError as e:
            raise NotSaveable(f"the build cache has lost {e.filename}") from e
        if meta is None:
            raise NotSaveable(f"the build cache has lost {folder}")
        return SavedUnit(Key.of(**meta["parts"]), str(meta["label"]), files)

    def place(self, store: Store) -> Path:
        """The entry's folder in a cache, filled from here where that has none."""

        def fill(folder: Path) -> None:
            for name, content in self.files.items():
                (folder / name).write_bytes(zlib.decompress(content))

        return store.get_or_build(self.key, fill, self.label)

    def to_bytes(self) -> bytes:
        """For `place_unit`, with a checksum."""
        return _sealed(pickle.dumps(self, protocol=5))


def place_unit(data: bytes) -> Path:
    """Put a unit that `SavedUnit.to_bytes` wrote into this process's build cache. Raises CacheError."""
    unit: SavedUnit = pickle.loads(_opened(data))
    return unit.place(open_store(Config.make()))


@dataclasses.dataclass(frozen=True)
class Artifact:
    """See the module's text."""

    name: str
    vendor: str
    source: str
    values: bytes
    natives: Mapping[str, Any]
    units: tuple[SavedUnit, ...]
    requires: Mapping[str, str]
    constants: Artifact | None = None
    folding: Folding | None = None
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)  # see `Compiled.counts`

    @staticmethod
    def of(
        name: str,
        source: str,
        values: Mapping[str, Any],
        vendor: str,
        natives: Mapping[str, Any] = types.MappingProxyType({}),
        units: Sequence[SavedUnit] = (),
        requires: Mapping[str, str] | None = None,
    ) -> Artifact:
        """source, values: of the Python function, with its globals. vendor: its name. natives: by global
        name, any picklable record.

        Raises NotSaveable, which says what cannot be pickled.
        """
        left_out = {*natives, *OWN_GLOBALS}
        kept = {name: value for name, value in values.items() if name not in left_out}
        return Artifact(
            name,
            vendor,
            source,
            _dump(kept),
            dict(natives),
            tuple(units),
            surroundings() | dict(requires or {}),
        )

    def with_constants(self, constants: Artifact, folding: Folding) -> Artifact:
        """This as the main program of a graph with frozen weights."""
        return dataclasses.replace(self, constants=constants, folding=folding)

    @property
    def all_units(self) -> tuple[SavedUnit, ...]:
        """Its units, and those of its constants."""
        return self.units + (() if self.constants is None else self.constants.units)

    def function(self, restored: Mapping[str, Any]) -> Callable[[list[Any]], Any]:
        """The function of the program; `restored` has a callable for each of `natives`."""
        return make_function(self.name, self.source, _load(self.values) | dict(restored))

    def to_bytes(self) -> bytes:
        """For a file; `from_bytes` is the way back."""
        # what it requires comes first, in plain types: another dicp must be able to read that much
        return _sealed(pickle.dumps((dict(self.requires), pickle.dumps(self, protocol=5)), protocol=5))

    @staticmethod
    def check(data: bytes) -> bytes:
        """Raises CacheError where the bytes are damaged, or made for another machine, torch or dicp.

        Gives the pickle of the artifact itself.
        """
        requires, content = pickle.loads(_opened(data))
        check_surroundings(requires)
        return content  # type: ignore[no-any-return]

    @staticmethod
    def from_bytes(data: bytes) -> Artifact:
        """Checked as in `check`. It holds code that runs: take it only from whom you would take a program."""
        artifact: Artifact = pickle.loads(Artifact.check(data))
        return artifact


def _sealed(body: bytes) -> bytes:
    return content_hash(body).encode() + b"\n" + body


def _opened(data: bytes) -> bytes:
    checksum, _, body = data.partition(b"\n")
    if content_hash(body).encode() != checksum:
        raise CacheError("a saved program is damaged: its checksum does not match", todo="save it again")
    return body


# -- where an artifact may run


@functools.cache
def sources_digest() -> str:
    """Digest of dicp's own sources: results of one state of them are never taken for another's."""
    return _digest(Path(dicp.__file__).parent)


def vendor_digest(vendor: Any) -> str:
    """The same of the package that a vendor's class is in, where that is not dicp."""
    return _package_digest(type(vendor).__module__.partition(".")[0])


@functools.cache
def _package_digest(name: str) -> str:
    file = getattr(sys.modules.get(name), "__file__", None)
    if name == "dicp" or file is None:
        return ""
    path = Path(file)
    return _digest(path.parent) if path.name == "__init__.py" else content_hash(path.read_bytes())


def _digest(folder: Path) -> str:
    files = sorted(p for p in folder.rglob("*") if p.suffix in SOURCES)
    parts = b"".join(str(p.relative_to(folder)).encode() + b"\0" + p.read_bytes() for p in files)
    return content_hash(parts)


def surroundings() -> dict[str, str]:
    """What every saved program needs to find unchanged."""
    return {
        "torch": torch.__version__,
        "dicp": f"{dicp.__version__} {sources_digest()}",
        "machine": platform.machine(),
    }


def check_surroundings(required: Mapping[str, str]) -> None:
    """Raises CacheError naming what differs."""
    here = surroundings()
    for what in here.keys() & required.keys():
        if here[what] != required[what]:
            raise CacheError(
                f"a saved program was made with {what} {required[what]}, and this is {what} {here[what]}",
                todo="compile and save it again here",
            )


# -- pickling a function's globals


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType):
            return "module", obj.__name__
        if isinstance(obj, OpOverload):
            return "op", obj.name()
        if (name := higher_order_name(obj)) is not None:
            return "higher_order", name
        for name, value in SINGLETONS.items():
            if obj is value:
                return "singleton", name
        return None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        kind, name = pid
        if kind == "singleton":
            return SINGLETONS[name]
        if kind == "op":
            return _operator(name)
        if kind == "higher_order":
            return getattr(torch.ops.higher_order, name)
        return importlib.import_module(name)


def _operator(name: str) -> Any:
    """An operator by its qualified name ("aten::add.Tensor"; without an overload the default one)."""
    space, _, rest = name.partition("::")
    if space == "dicp":
        register()
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
    except AttributeError as e:
        raise CacheError(
            f"a saved program calls the operator {name}, which is not registered here",
            todo="import the module that registers it before loading",
        ) from e


def _dump(values: Mapping[str, Any]) -> bytes:
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and type(value) is not torch.Tensor:
            raise NotSaveable(f"{name} is a {type(value).__name__}")
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=5).dump(dict(values))
    except Exception as e:  # an object's own way to be pickled may raise anything
        raise NotSaveable(f"a program cannot be saved: {e}") from e
    return buffer.getvalue()


def _load(data: bytes) -> dict[str, Any]:
    values: dict[str, Any] = _Unpickler(io.BytesIO(data)).load()
    return values


__all__ = [
    "Artifact",
    "NotSaveable",
    "SavedUnit",
    "check_surroundings",
    "sources_digest",
    "surroundings",
    "vendor_digest",
]

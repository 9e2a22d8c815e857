"""Compiled graphs in torch's own caches: AOTAutograd's, Dynamo's (`caching_precompile`), and files of
`aot_compile(...)`.

torch pickles what the inner compilers return and later calls `post_compile` on what it unpickles. Its key
knows the graph and torch, not this backend: `cache_tag` is what is added to it.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.fx as fx

from dicp import compat
from dicp.compat import autograd
from dicp.compiler import Compiled
from dicp.config import Config
from dicp.errors import CacheError, DicpError, VendorError
from dicp.runtime.artifact import Artifact, sources_digest, vendor_digest
from dicp.runtime.dump import say
from dicp.runtime.entry import content_hash
from dicp.runtime.failure import refuse_without_memory
from dicp.runtime.frozen import Frozen
from dicp.vendor.asking import asked, fingerprint, has, unwrapped
from dicp.vendor.base import AnyVendor, VendorBase

# the vendor and the config of the compile that torch loads something for
_Compile = tuple[AnyVendor, Config] | None
_compile: contextvars.ContextVar[_Compile] = contextvars.ContextVar("dicp_compile", default=None)


class SavedGraph(autograd.output_code()):  # type: ignore[misc]
    """A compiled graph that torch can store: called with a (boxed) list of inputs, pickled as an Artifact.

    key: the one under which `autograd.Shortcut` finds it, "" for none. problem: why it cannot be stored.
    """

    def __init__(
        self, call: Callable[[list[Any]], Any] | None, artifact: bytes, key: str = "", problem: str = ""
    ) -> None:
        super().__init__()
        self.call, self.artifact, self.key, self.problem = call, artifact, key, problem
        self._boxed_call = True

    def __call__(self, inputs: list[Any]) -> Any:
        try:
            return self.call(inputs)  # type: ignore[misc]
        except RuntimeError as e:
            refuse_without_memory(e)
            raise

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Called by torch on what it has unpickled."""
        if self.call is None:
            self.call = load(self.artifact, *(_compile.get() or (None, Config.make())))

    def prepare_for_serialization(self) -> None:
        """Called by torch before it pickles."""
        if self.problem:
            autograd.bypass_cache(self.problem)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Triton's kernels travel in the artifact."""

    def __reduce__(self) -> Any:
        return _unpickled, (self.artifact, self.key)

    def __copy__(self) -> SavedGraph:
        return self

    def __deepcopy__(self, memo: Any) -> SavedGraph:
        return self


class LateGraph(SavedGraph):
    """A backward compiled at its first call: torch saves it between that compile and the call, when the
    settings that the forward was compiled under no longer hold; the compile sets them and this ends them."""

    shortcut: Any = None

    def __call__(self, inputs: list[Any]) -> Any:
        autograd.end_bundling()
        if self.shortcut is not None:
            self.shortcut.note()
            self.shortcut = None
        self.__class__ = SavedGraph
        return SavedGraph.__call__(self, inputs)


def _unpickled(artifact: bytes, key: str = "") -> SavedGraph:
    Artifact.check(artifact)  # here, not at the load: an error now is a miss for torch
    return SavedGraph(None, artifact, key)


def load(data: bytes, vendor: AnyVendor | None, config: Config) -> Callable[[list[Any]], Any]:
    """The function of a saved program. Raises CacheError.

    vendor: taken where it is the program's; else the installed one of that name is.
    """
    from dicp import vendor as vendors

    artifact = Artifact.from_bytes(data)
    if vendor is None or vendor.name != artifact.vendor:
        vendor = asked(vendors.get(artifact.vendor))
    call = vendor.load(artifact, config)
    if artifact.folding is not None:
        constants = vendor.load(artifact.constants, config)
        call = Frozen(artifact.name, call, constants, artifact.folding, vendor.pack)
    compat.counters().update({"graphs_loaded": 1, **artifact.counts})
    say(f"{artifact.name}: loaded as it was saved, not compiled", config)
    return call


def saved(
    compiled: Compiled, config: Config, shortcut: autograd.Shortcut | None, late: bool, effects: bool
) -> SavedGraph:
    """What the inner compiler returns for a graph; one that cannot be saved says why when torch tries to.

    late: the compile is that of a backward at its first call. effects: the graph takes effect tokens, which
    torch does not pass to what it takes from its cache.
    """
    if effects:
        return SavedGraph(compiled.call, b"", problem=f"{compiled.name}: it orders effects")
    if compiled.program.save is None:
        return SavedGraph(compiled.call, b"", problem=f"{compiled.name}: its vendor cannot save programs")
    try:
        program = dataclasses.replace(_artifact(compiled), counts=compiled.counts)
        artifact = program.to_bytes()
    except CacheError as e:
        say(f"{compiled.name} is not kept: {e}", config)
        return SavedGraph(compiled.call, b"", problem=f"{compiled.name}: {e}")
    for unit in program.all_units:
        autograd.record_artifact(unit.key.digest, unit.to_bytes())
    key = "" if shortcut is None else shortcut.key
    if not late:
        return SavedGraph(compiled.call, artifact, key)
    autograd.begin_bundling()
    graph = LateGraph(compiled.call, artifact, key)
    graph.shortcut = shortcut
    return graph


def _artifact(compiled: Compiled) -> Artifact:
    """What the vendor's `program.save` gives. Raises VendorError where that fails, or is no Artifact."""
    what = f"{compiled.name}: the program's `save`"
    try:
        artifact = compiled.program.save()  # type: ignore[misc]
    except DicpError:
        raise
    except Exception as e:  # a vendor's code may raise anything
        raise VendorError(f"{what} failed: {type(e).__name__}: {e}") from e
    if not isinstance(artifact, Artifact):
        raise VendorError(f"{what} gave {artifact!r}, which is no Artifact")
    return artifact


def can_save(gm: fx.GraphModule, inputs: Sequence[Any], vendor: AnyVendor, config: Config) -> bool:
    """Whether the results for a graph may come from, and go to, torch's cache: where nobody watches the
    compile, and the key knows all that they depend on."""
    watched = config.dump is not None or config.debug >= 2 or config.verify
    return has(vendor, VendorBase.load) and not watched and not beyond_key(gm, inputs)


def beyond_key(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether results for a graph depend on what torch's key does not know.

    That is the values of tensors that are constants in it; floats that vary, which tracing may settle under a
    guard; which inputs share memory, for which it guards, too; and what operators do that are registered
    outside torch and installed packages. What comes from the cache brings none of those guards.
    """
    graphs = [m for m in gm.modules() if isinstance(m, fx.GraphModule)]
    nodes = [(g, n) for g in graphs for n in g.graph.nodes]
    return (
        any(n.op == "get_attr" and _is_tensor(g, str(n.target)) for g, n in nodes)
        or any(isinstance(n.meta.get("example_value"), torch.SymFloat) for _, n in nodes)
        or _share_memory([*gm.parameters(), *gm.buffers(), *inputs])
        or None in packages(gm).values()
    )


def _is_tensor(gm: fx.GraphModule, path: str) -> bool:
    value: Any = gm
    for part in path.split("."):
        value = getattr(value, part, None)
    return isinstance(value, torch.Tensor)


def _share_memory(values: Sequence[Any]) -> bool:
    tensors = {id(x): x for x in values if isinstance(x, torch.Tensor)}
    places = [place for x in tensors.values() if (place := compat.storage_place(x)) is not None]
    return len(set(places)) < len(places)


_TORCHS = frozenset(
    """aten prims prim rngprims dicp higher_order inductor quantized quantized_decomposed mkldnn
    mkldnn_prepacked onednn c10d _c10d_functional _c10d_functional_autograd _dtensor profiler""".split()
)


def packages(gm: fx.GraphModule) -> dict[str, str | None]:
    """By namespace, the versions of the packages whose operators a graph calls; None where none of that name
    is installed, and what its operators do may change from run to run."""
    graphs = [m for m in gm.modules() if isinstance(m, fx.GraphModule)]
    spaces = {_namespace(n.target) for g in graphs for n in g.graph.nodes if n.op == "call_function"}
    return {s: _version(s) for s in sorted(spaces - _TORCHS - {""})}


def _namespace(target: Any) -> str:
    """Of an operator of torch's dispatcher; "" of other functions."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    return target.namespace if isinstance(target, torch._ops.OpOverload) else ""


@functools.lru_cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cache_tag(
    vendor: AnyVendor, config: Config, packages: Mapping[str, str | None] = MappingProxyType({})
) -> str:
    """What torch's cache key has to know of dicp: its sources, the vendor with its toolchain, the options,
    what generated code is fitted to, what traces of attention go by, and the packages that have operators in
    the graph."""
    parts = (
        sources_digest(),
        vendor.name,
        vendor_digest(unwrapped(vendor)),
        fingerprint(vendor, config),
        config.fingerprint(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        compat.attention_kernels(),
        sorted(packages.items()),
    )
    return "dicp-" + content_hash(repr(parts))


@contextlib.contextmanager
def loading_under(vendor: AnyVendor, config: Config) -> Iterator[None]:
    """What torch unpickles inside is loaded for this vendor under this config."""
    token = _compile.set((vendor, config))
    try:
        yield
    finally:
        _compile.reset(token)

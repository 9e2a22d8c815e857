"""What a vendor is: data and a few functions, found through the entry-point group `dicp.vendors`.

Two families fit. A *kernel vendor* takes lowered kernels (through `assemble`); a *graph-compiler
vendor* hands whole graphs, or the parts it supports, to a toolchain of its own (`GraphVendor`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.fx as fx


@dataclass(frozen=True)
class Claim:
    """An op that the vendor gives to a library.

    emit(writer, call) adds the call's source lines to the vendor's writer.
    out: the call writes into memory we plan (else it allocates).
    strides(lowering, node, args) -> strides of each result, None for "as traced".
    prepare(lowering, node, args) -> arguments, when they must be other than the node's own (dense, ...).
    as_traced: operands lie in memory as they were traced, on which the call's results may depend.
    workspace(lowering, node, args) -> bytes that a call with `out` needs while it runs, planned as temporary
    values are: the last of its outputs.
    updates: the call writes its result over its first operand, row-major, which nothing else reads by then.
    over: the position of an operand over which the call can write its only result as well. Where that lies in
    memory as the result does and is dead then, the plan gives both the same memory.
    """

    name: str
    emit: Callable[[Any, Any], Any]
    out: bool = False
    strides: Callable[[Any, fx.Node, Sequence[Any]], Any] = lambda lowering, node, args: None
    prepare: Callable[[Any, fx.Node, Sequence[Any]], Sequence[Any]] | None = None
    as_traced: bool = False
    workspace: Callable[[Any, fx.Node, Sequence[Any]], int] | None = None
    updates: bool = False
    over: int | None = None


def dense(*positions: int) -> Callable[[Any, fx.Node, Sequence[Any]], Sequence[Any]]:
    """A `prepare` of Claim: the arguments at these positions row-major, for a call that takes dims of them as
    one or ignores their strides."""

    def prepare(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
        return [
            lowering.operand(a, dense=True) if k in positions and a is not None else a
            for k, a in enumerate(args)
        ]

    return prepare


@dataclass(frozen=True)
class Machine:
    """What scheduling has to know of a device.

    threads: rows it works on at a time; long reductions are split until there are four times as many results.
    lanes: float32 elements of a vector. cache_bytes: what a thread may read again at little cost.
    split_columns: elements under one result from which a reduction is split whose neighbouring results are
    contiguous. Any is split in `most_pieces` at the most, each of `least_piece` elements at the least, and
    not into more than `most_results` times as many results, pieces counted, as are enough without splitting;
    `most_columns` times where neighbouring results are contiguous.
    launch_bytes: what it moves in the time that one kernel more takes; kernels of one iteration space that
    move less together become one. shared_row: elements of a contiguous row that later phases read again from
    a cache that all threads share, if that holds more of them than `cache_bytes` does. device: the torch type
    of the tensors that programs take here; None: the one that the vendor serves, or whichever they are.
    one_allocator: memory that a program frees serves the libraries it calls, too.
    """

    threads: int
    lanes: int = 16
    cache_bytes: int = 128 << 10
    split_columns: int = 4096
    most_pieces: int = 1 << 30
    least_piece: int = 1
    most_results: int = 16
    most_columns: int = 16
    launch_bytes: int = 0
    shared_row: int = 0
    device: str | None = None
    one_allocator: bool = True

    @property
    def row(self) -> int:
        """Elements of a row that later phases of a kernel may read again."""
        return self.cache_bytes // 4

    @property
    def column(self) -> int:
        """The same along a strided dim: every element brings a cache line, and its neighbours another row."""
        return self.cache_bytes // 128


class Vendor(Protocol):
    """A kernel vendor."""

    name: str
    device: str  # torch device type it serves

    def available(self, config: Any) -> str | None:
        """None when it can run here, else what is missing and what to do."""

    def supports(self, target: Any, node: fx.Node) -> bool:
        """Whether a dicp::* op may be formed for this node by a rewrite pass."""

    def keeps(self, op: Any) -> bool:
        """Whether it has a claim for this op (an OpOverload), so that it is not decomposed on the way."""

    def claim(self, node: fx.Node, config: Any) -> Claim | None:
        """The library call for a node, or None. Under config.numerics "eager", the one that eager makes."""

    def machine(self, config: Any) -> Machine:
        """The device, as far as lowering and fusion care."""

    def fingerprint(self, config: Any) -> str:
        """Stable text of everything of the vendor that changes generated code: toolchain, ISA, library
        choices."""

    def assemble(self, program: Any, config: Any) -> Callable[[list[Any]], Any]:
        """Emit, build and load a Program; returns the function that runs it on a (boxed) list of inputs.

        Where the vendor has a `load`, it also sets `program.save`, a function without arguments that gives
        the Artifact (runtime/artifact.py): the Python function, a record of each native one, and the units
        they are in. It is called at most once, after the compile, and raises NotSaveable, saying why.
        """


class GraphVendor(Protocol):
    """A vendor whose toolchain takes graphs."""

    name: str
    device: str

    def available(self, config: Any) -> str | None:
        """As for a kernel vendor."""

    def keeps(self, op: Any) -> bool:
        """Whether the toolchain takes this op (an OpOverload) whole. What it does not keep is decomposed,
        where torch has a decomposition to its core ops."""

    def supports(self, target: Any, node: fx.Node) -> bool:
        """Whether the toolchain takes this call, in or out of the graph: a pass asks it before it forms a
        dicp::* op. The rest runs in eager PyTorch, counted as extern."""

    def fingerprint(self, config: Any) -> str:
        """As for a kernel vendor."""

    def build(self, gm: fx.GraphModule, config: Any) -> Callable[..., Sequence[Any]]:
        """Compile a graph of supported calls: the function that takes the graph's inputs as arguments and
        gives its results, in memory that is neither an input's nor another result's.

        Where the vendor has a `load`, what this returns is pickled to be kept, so it holds what its toolchain
        made (bytes, not handles) and unpickles to something that runs."""


class Emits(Protocol):
    """What a kernel vendor has besides, where its kernels cannot have every op, dtype or size."""

    def emits(self, node: fx.Node) -> bool:
        """Whether it writes kernels for this call of an aten op, views among them. Those it does not are
        externs, unless it claims them."""


class Packs(Protocol):
    """What a kernel vendor has besides, where its library has forms of its own for weights that do not
    change."""

    def packs(self, node: fx.Node) -> str | None:
        """The form that the constant weight, argument 1, of a dicp::linear or dicp::conv is best given in;
        None where it is best as it is. A packed convolution answers channels-last."""

    def pack(self, weight: Any, form: str) -> Any:
        """The weight in that form: an object whose `data_ptr()` is the integer that the program passes on.
        """


class Loads(Protocol):
    """What a vendor of either family has besides, where its programs are to be kept in torch's caches and in
    files of `aot_compile`. Without it they are compiled in every process."""

    def load(self, artifact: Any, config: Any) -> Callable[[list[Any]], Any]:
        """The function of a saved program (runtime/artifact.py), in a process that may have no toolchain.

        A graph vendor mostly returns `artifact.function({})`. Checksum, torch, dicp and machine have been
        checked. Raises CacheError where this device cannot run it, which counts as a miss.
        """


class Begins(Protocol):
    """What a kernel vendor has besides, where some of its build needs neither kernels nor a memory plan."""

    def begin(self, lowered: Any, config: Any) -> AbstractContextManager[Any]:
        """Start building what calls (`lowered.defs`) need. `assemble` gets what this gives as
        `program.begun`, before it is left; what is wrong with the build is for `assemble` to raise."""


class Offers(Protocol):
    """What a kernel vendor has besides, where several of its calls can serve one node (dicp.tuning)."""

    def candidates(self, node: fx.Node, config: Any) -> Sequence[Claim]:
        """The claims for a node, each under a name of its own. The first is what `claim` returns; under
        config.numerics "eager" the only one."""

    def device_name(self, config: Any) -> str:
        """Stable text of what timings depend on besides threads: the processor's model, instructions used."""

    def clock(self, config: Any) -> Callable[[Callable[[], None]], float]:
        """What tells the seconds that the device takes for the calls that a function makes. Only of vendors
        whose calls return before they are done: what the host takes to make them is not in it, unless the
        clock has an attribute `hidden` that is false after a measurement."""


@dataclass(frozen=True)
class Load:
    """A call, and how many operations, or bytes, it gets through."""

    call: Callable[[], object]
    amount: int

    def rate(self, ms: float) -> float:
        """Thousand millions of them a second, where the call takes that long."""
        return self.amount / ms / 1e6


class Measures(Protocol):
    """What a vendor has besides, for the roofline of dicp.bench."""

    def ceilings(self, dtype: torch.dtype) -> tuple[Sequence[Load], Load]:
        """Calls of which the fastest shows how much arithmetic of the dtype the device can do, and one that
        reads memory as fast as it can."""


def takes_graphs(vendor: Any) -> bool:
    """Whether a vendor is a GraphVendor."""
    return hasattr(vendor, "build")

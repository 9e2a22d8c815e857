"""What a vendor is: data and a few functions, found through the entry-point group `dicp.vendors`.

Two families fit. A *kernel vendor* takes lowered kernels (through `assemble`); a *graph-compiler
vendor* hands whole graphs, or the parts it supports, to a toolchain of its own (`GraphVendor`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.fx as fx

from dicp.config import Config
from dicp.errors import CacheError

if TYPE_CHECKING:
    from typing_extensions import TypeIs


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


@dataclass(frozen=True)
class Load:
    """A call, and how many operations, or bytes, it gets through."""

    call: Callable[[], object]
    amount: int

    def rate(self, ms: float) -> float:
        """Thousand millions of them a second, where the call takes that long."""
        return self.amount / ms / 1e6


ConvolutionPart = Literal["result", "input", "weight"]
"""What is computed: the convolution's result, or the gradient of its input or of its weight."""


@dataclass(frozen=True)
class Convolution:
    """One convolution as the vendor is asked about it: `matmul_pays(part, convolution) -> bool`. Symbolic
    sizes are those seen while tracing."""

    positions: int
    """batch * height * width of the result"""
    size: tuple[int, int]
    """height and width of the result"""
    channels: tuple[int, int]
    """of input and result"""
    window: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dtype: torch.dtype
    stored: torch.dtype
    """dtype of what its input is a copy of: a low precision where `widen` has it computed in float32"""

    @property
    def patches(self) -> bool:
        """Whether the windows lie side by side, so that gathering them copies each element once."""
        return self.window == self.stride and self.padding == (0, 0)

    @property
    def apart(self) -> bool:
        """Whether no windows overlap, so that all together take no more memory than the image."""
        return all(n == 1 or k <= s for n, k, s in zip(self.size, self.window, self.stride, strict=True))

    @property
    def pointwise(self) -> bool:
        """Whether x's rows are the positions as they are."""
        return self.window == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0)


@dataclass(frozen=True)
class LayoutCosts:
    """Bytes moved, per byte of a tensor; a vendor may bring its own as `layout_costs` (passes/layout.py).

    Defaults are those of oneDNN on a CPU. A conversion reads and writes; channels-last spares, for the result
    and for each gradient, part of the blocking of the images, which the library would do first; a window
    larger than 1x1 has its weight reordered twice more, which is slower by the byte where it is not in the
    cache.
    """

    conversion: float = 2.0
    activation_gain: float = 0.5
    strided_gain: float = 2.0
    """The same of transposed convolutions with a stride, and of gradients of the input of such: row-major,
    they take up to four times as long. Per byte, 1 to 7 are spared: 1.9 of 8 images of 64 channels and 56x56
    in front of 3x3 by steps of 2, 6.5 of 128 channels from 32x32 to 64 of twice that (2 Intel cores)."""
    weight_loss: float = 4.0
    weight_bytes: int = 10 << 20
    """Size from which all of a weight's loss counts, of smaller ones in proportion: 0.8 per byte of 2.1 MB,
    1.8 of 4.7, 2.7 to 5.8 of 9.4 (the same)."""
    min_positions: int = 256
    """Output positions (batch * height * width) under which the library is slower channels-last: of two
    images, the backward of 512 channels at 7x7 is far slower, that of 256 at 14x14 no longer."""


class VendorBase:
    """What both families have: what is abstract is required, the rest has a default. A vendor may inherit
    `Vendor` or `GraphVendor`, and need not: for an object that does not, `Asked` (vendor/asking.py) answers
    with the defaults here, and `require_whole` says what it lacks, which is why this is no ABC."""

    name: str
    device: str
    """torch device type it serves"""

    @abstractmethod
    def available(self, config: Config) -> str | None:
        """None when it can run here, else what is missing and what to do."""

    @abstractmethod
    def supports(self, target: Any, node: fx.Node) -> bool:
        """Whether a dicp::* op may be formed for this node by a rewrite pass."""

    @abstractmethod
    def keeps(self, op: Any) -> bool:
        """Whether it has a claim for this op (an OpOverload), so that it is not decomposed on the way."""

    @abstractmethod
    def fingerprint(self, config: Config) -> str:
        """Stable text of everything of the vendor that changes generated code: toolchain, ISA, library
        choices."""

    # -- what a vendor may have besides, with what holds where it has not ---------------------------------

    backend: str | None = None
    """The torch.compile name that the conformance suite calls it by, where it is not `name`."""

    layout_costs: LayoutCosts = LayoutCosts()
    """What an order of images in memory costs and gains (passes/layout.py)."""

    def warm_up(self, gm: fx.GraphModule, config: Config) -> None:
        """Called with Dynamo's graph as a compile begins: what takes long to start may start here."""

    def load(self, artifact: Any, config: Config) -> Callable[[list[Any]], Any]:
        """The function of a saved program (runtime/artifact.py), in a process that may have no toolchain.
        Vendors have it whose programs are to be kept in torch's caches and in files of `aot_compile`; those
        of others are compiled in every process.

        A graph vendor mostly returns `artifact.function({})`. Checksum, torch, dicp and machine have been
        checked. Raises CacheError where this device cannot run it, which counts as a miss.
        """
        raise CacheError(f"{self.name} loads no programs")

    def matmul_pays(self, part: ConvolutionPart, conv: Convolution) -> bool:
        """Whether a convolution's result or gradient is better a matrix product (passes/conv_matmul.py). A
        transposed convolution is the input's gradient of another, which is what is asked about."""
        return False

    def computes_wide(self, node: fx.Node) -> bool:
        """Whether a contraction of a low precision is better computed in float32 (passes/widen.py)."""
        return False

    def channels_last_gain(self, node: fx.Node) -> float:
        """Bytes, as the layout pass counts them, that a convolution spares by an algorithm which only
        channels-last has (passes/layout.py)."""
        return 0.0

    def padded_channels(self, node: fx.Node) -> int | None:
        """To how many channels the input of a dicp::conv is better filled up with zeros; None: it is best as
        it is (passes/pad_channels.py)."""
        return None

    def unfuses_bias(self, node: fx.Node) -> bool:
        """Whether a kernel better adds the bias of an addmm or a dicp::linear (passes/unfuse_bias.py)."""
        return False

    def splits_gradients(self, node: fx.Node) -> bool:
        """Whether a convolution's gradients are better calls of their own (passes/split_backward.py)."""
        return False

    def packs(self, node: fx.Node) -> str | None:
        """The form that the constant weight, argument 1, of a dicp::linear or dicp::conv is best given in;
        None where it is best as it is. A packed convolution answers channels-last."""
        return None

    def pack(self, weight: torch.Tensor, form: str) -> Any:
        """The weight in a form that `packs` named: an object whose `data_ptr()` is the integer that the
        program passes on."""
        raise NotImplementedError(f"the weight's form {form!r}")

    def clock(self, config: Config) -> Callable[[Callable[[], None]], float] | None:
        """What tells the seconds that the device takes for the calls that a function makes. Only of vendors
        whose calls return before they are done: what the host takes to make them is not in it, unless the
        clock has an attribute `hidden` that is false after a measurement. None: the host's clock tells."""
        return None

    def ceilings(self, dtype: torch.dtype) -> tuple[Sequence[Load], Load] | None:
        """Calls of which the fastest shows how much arithmetic of the dtype the device can do, and one that
        reads memory as fast as it can, for the roofline of dicp.bench; None: none is drawn."""
        return None


class Vendor(VendorBase):
    """A kernel vendor."""

    @abstractmethod
    def claim(self, node: fx.Node, config: Config) -> Claim | None:
        """The library call for a node, or None. Under config.numerics "eager", the one that eager makes."""

    @abstractmethod
    def machine(self, config: Config) -> Machine:
        """The device, as far as lowering and fusion care."""

    @abstractmethod
    def assemble(self, program: Any, config: Config) -> Callable[[list[Any]], Any]:
        """Emit, build and load a Program; returns the function that runs it on a (boxed) list of inputs.

        Where the vendor has a `load`, it also sets `program.save`, a function without arguments that gives
        the Artifact (runtime/artifact.py): the Python function, a record of each native one, and the units
        they are in. It is called at most once, after the compile, and raises NotSaveable, saying why.
        """

    # -- what a kernel vendor may have besides -------------------------------------------------------------

    def candidates(self, node: fx.Node, config: Config) -> Sequence[Claim]:
        """The claims for a node, each under a name of its own, for max-autotune (dicp.tuning). The first is
        what `claim` returns; under config.numerics "eager" the only one."""
        claim = self.claim(node, config)
        return [] if claim is None else [claim]

    def device_name(self, config: Config) -> str:
        """Stable text of what timings depend on besides threads: the processor's model, instructions used."""
        return self.device

    words: Collection[str] | None = None
    """Names of the scalar primitives (UNARY, BINARY and TERNARY of ir/expr.py) and kinds of reductions
    (ReduceKind and ScanKind of ir/value.py) that it writes, and "scan" where it writes running ones; None:
    all. A call whose kernels need another is an extern, unless it is claimed."""

    float8: Collection[torch.dtype] = ()
    """Floats of eight bits (FLOAT8 of ir/expr.py) that its kernels load, and round to in stores. A call that
    has another is an extern, unless it is claimed."""

    def emits(self, node: fx.Node) -> bool:
        """Whether it writes kernels for this call of an aten op, views among them. Those it does not are
        externs, unless it claims them. It decides by ops and dtypes; `words` goes by what kernels need."""
        return True

    def aten_call(self, node: fx.Node, config: Config) -> Claim | None:
        """A call of the node's own aten op from generated code, asked for where neither a claim nor a rule
        serves it; None: it is an extern. A vendor that has this calls whatever aten op, so that under
        config.numerics "eager" fewer are decomposed."""
        return None

    def begin(self, lowered: Any, config: Config) -> AbstractContextManager[Any]:
        """Start building what needs neither kernels nor a memory plan: calls (`lowered.defs`). `assemble`
        gets what this gives as `program.begun`, before it is left; what is wrong with the build is for
        `assemble` to raise."""
        return nullcontext()


class GraphVendor(VendorBase):
    """A vendor whose toolchain takes graphs.

    keeps(op): whether the toolchain takes this op whole. What it does not keep is decomposed, where torch has
    a decomposition to its core ops. supports(target, node): whether it takes this call, in or out of the
    graph: a pass asks it before it forms a dicp::* op. The rest runs in eager PyTorch, counted as extern.
    """

    @abstractmethod
    def build(self, gm: fx.GraphModule, config: Config) -> Callable[..., Sequence[Any]]:
        """Compile a graph of supported calls: the function that takes the graph's inputs as arguments and
        gives its results, in memory that is neither an input's nor another result's.

        Where the vendor has a `load`, what this returns is pickled to be kept, so it holds what its toolchain
        made (bytes, not handles) and unpickles to something that runs."""


AnyVendor = Vendor | GraphVendor

MEMBERS: dict[str, Any] = {
    name: member
    for family in (VendorBase, Vendor, GraphVendor)
    for name, member in vars(family).items()
    if not name.startswith("_")
}
HOOKS = {n: m for n, m in MEMBERS.items() if not getattr(m, "__isabstractmethod__", False)}
"""What vendors may have besides, by name: the default."""


def takes_graphs(vendor: VendorBase) -> TypeIs[GraphVendor]:
    """Whether a vendor is a GraphVendor."""
    return hasattr(vendor, "build")


def first(claims: Sequence[Claim]) -> Claim | None:
    """The `claim` of a vendor that has `candidates`."""
    return claims[0] if claims else None

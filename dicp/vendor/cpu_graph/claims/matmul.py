"""Matrix products: which library serves one, and its call."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import known_equal, known_true, size_hint
from dicp.config import Config
from dicp.ir import index as ix
from dicp.ir.meta_keys import PACKED
from dicp.ops.table import table
from dicp.passes.facts import bytes_of, is_saved
from dicp.passes.freeze import is_constant
from dicp.runtime.cpu import cpu_flags, cpu_maker
from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim, dense
from dicp.vendor.cpu_graph.claims import packed_mkl
from dicp.vendor.cpu_graph.claims.common import (
    ACTIVATIONS,
    FLOATS,
    LOW,
    SHIM,
    activation,
    argument,
    aten,
    dtype_of,
    multiplies,
    onednn_has,
    transposed,
    whole_lines,
)
from dicp.vendor.cpu_graph.claims.gemm import gemm, gemm_packed, gemm_pairs
from dicp.vendor.cpu_graph.claims.gemv import PACKED_ROWS, TWO_VECTORS, gemv, gemv_or, seems_few
from dicp.vendor.cpu_graph.claims.operands import as_traced, is_batched, operands_of
from dicp.vendor.cpu_graph.microkernels import available

SHALLOW = {True: 1024, False: 512}
"""With AVX-512, and without: depth up to which oneDNN's float32 products err about twice as much as MKL's.
Its kernels add all of it, with AVX-512 pieces of a thousand and more, into one sum (scripts/products.py)."""


def prefers_onednn(node: fx.Node) -> bool:
    """Whether oneDNN serves a product better than MKL does.

    bf16 goes to oneDNN wherever that has it. MKL runs fp32 at half of an AMD core's AVX-512 peak, oneDNN at
    95 %; on Intel MKL is at the peak, and with AVX2 oneDNN is not ahead of it (scripts/products.py).
    """
    if not _onednn_serves(node) or _left(node).dtype == torch.bfloat16:
        return _onednn_serves(node)
    return halved_by_mkl()


def halved_by_mkl() -> bool:
    """Whether MKL runs float32 at half of this processor's peak."""
    return cpu_maker() == "amd" and "avx512f" in cpu_flags()


def prefers_tiles(node: fx.Node) -> bool:
    """Whether our own tiles serve a product better than the libraries do.

    They do where those have no products of a low precision. In float32 they are ahead of MKL on AMD with
    AVX2, however the operands lie (scripts/products.py), and on Intel with few rows (`_reads_as_stored`).
    Where MKL is not at its peak, they serve what oneDNN does not, or not as well (`_by_onednn`).
    """
    if gemm("product", node) is None:
        return False
    x = _left(node)
    if x.dtype in LOW:
        return not multiplies(x.dtype)
    if not _from_memory(node):
        return False
    if cpu_maker() != "amd":
        return cpu_maker() == "intel" and _reads_as_stored(node)
    return not halved_by_mkl() or not _by_onednn(node)


def _reads_as_stored(node: fx.Node) -> bool:
    """Whether x has so few rows that MKL, which packs a weight first, is behind tiles, which read one along
    the depth as it is stored: 32 rows 140 to 180 GF/s for 190 to 237, 128 rows 234 to 268 for 247 to 261, 256
    rows level (two Intel cores of the 5th generation, scripts/products.py and a one-off script). A vector of
    rows that is not full costs as much (65 rows 194 to 218 for 158 to 188), and up to 80 rows the template
    for few, or MKL, is not behind. Constant weights MKL has packed beforehand."""
    at, rows = operands_of(node), math.prod(_left(node).shape[:-1])
    if at is None or is_batched(node) or "avx512f" not in cpu_flags():
        return False
    w = node.args[at.w]
    along_depth = known_equal(w.meta["val"].stride(-1 if at.transposed else -2), 1)  # type: ignore[union-attr]
    if not isinstance(rows, int) or not along_depth or is_constant(w):
        return False
    full = 15 * whole_lines(rows) <= 16 * rows
    return PACKED_ROWS < rows <= max(TWO_VECTORS) or 80 < rows <= TURNED_ROWS_OF_INTEL and full


TURNED_ROWS = 64
"""Rows up to which tiles, which turn x, are ahead of oneDNN, which turns a weight (scripts/products.py)."""
TURNED_ROWS_OF_INTEL = 128
"""The same beside MKL, which packs a weight."""
LARGE_RESULT = 24 << 20
"""Bytes of a result from which on tiles, which write where results are kept, are preferred to oneDNN, which
allocates what it returns: from 32 MB on malloc maps memory anew for each, whose pages cost more than the call
spares; a little below, it raises the peak (Mixtral's logits: 50 MB for 35, of 1.01 to 1.04 of the time)."""
EVEN_ROWS, EVEN_RESULT = 128, 8 << 20
"""Rows up to which tiles take as long as oneDNN (scripts/products.py), and bytes of a result from which on it
is theirs, then: T5's peak was 22.5 MB for 27 (eager's 23 to 28; these choices forced on a processor
with AVX2 alone, one with AVX-512 not measured). Frozen weights are packed as before."""

SAVED_RESULT = 1 << 20
"""Bytes of a result from which on it is theirs where a forward saves it for its backward: malloc, from which
oneDNN has it, gives the pages back as those are dropped, and each step faults them in anew. Steps of ViT took
604 to 656 ms, with 22,000 faults, and 569 to 584 so; of ConvNeXt 188 to 235, and 188 to 214."""


def _by_onednn(node: fx.Node) -> bool:
    """Whether oneDNN is ahead of our tiles in float32: with rows of x enough, and a weight along depth."""
    at, x = operands_of(node), _left(node)
    if at is None or is_batched(node) or not _onednn_serves(node):
        return False
    w = node.args[at.w].meta["val"]  # type: ignore[union-attr]
    as_rows = known_equal(w.stride(-1 if at.transposed else -2), 1) and known_equal(x.stride(-1), 1)
    rows = size_hint(math.prod(x.shape[:-1]))
    kept = _result_bytes(node) >= EVEN_RESULT if rows <= EVEN_ROWS else result_is_large(node)
    kept = kept or (_result_bytes(node) >= SAVED_RESULT and is_saved(node))
    return as_rows and rows > TURNED_ROWS and not kept


def result_is_large(node: fx.Node) -> bool:
    """Whether a result had better be written where results are kept."""
    return _result_bytes(node) >= LARGE_RESULT


def _result_bytes(node: fx.Node) -> int:
    return bytes_of(node.meta["val"])


def _onednn_serves(node: fx.Node) -> bool:
    """Whether oneDNN has the dtype of a product and what follows it, and is as exact as dicp's rule asks. Its
    call has an activation or a sum behind it, not both."""
    x, at = _left(node), operands_of(node)
    if at is not None and at.act != "none":
        added = at.other is not None and argument(node, at.other, "other", None) is not None
        if at.act not in ACTIVATIONS or added:
            return False
    if not known_true(x.shape[-1] > 0):
        return False  # of no depth, as sums over rows that are found may be, it raises
    deep = x.dtype == torch.float32 and size_hint(x.shape[-1]) > SHALLOW["avx512f" in cpu_flags()]
    return onednn_has(x.dtype) and not deep


def _left(node: fx.Node) -> torch.Tensor:
    """The left operand."""
    adds = node.target in (aten.addmm.default, aten.baddbmm.default)
    return node.args[1 if adds else 0].meta["val"]  # type: ignore[union-attr, no-any-return]


def mm(node: fx.Node, config: Config) -> list[Claim]:
    """y = x w. Candidates, as of every function here: the heuristic's own choice first."""
    dtype = dtype_of(node)
    if dtype not in (*FLOATS, torch.float64):
        return []
    blas = Claim(
        "mm: BLAS",
        lambda w, c: w.call(
            c, SHIM + "mm_out", [w.output(c.outputs[0]), w.tensor(c.args[0]), w.tensor(c.args[1])]
        ),
        out=True,
        prepare=_as_traced(0, 1),
    )
    onednn = Claim(
        "mm: oneDNN",
        lambda w, c: _linear_call(w, c, c.args[0], transposed(c.args[1]), None, None, "none"),
        prepare=_operands(weight=1),
    )
    return _ordered("mm", node, config, blas, onednn)


FEW_BYTES = 1 << 18
"""Bytes of weights under which a template's unit, 0.3 s of compiling, saves microseconds."""


def _ordered(
    label: str, node: fx.Node, config: Config, blas: Claim | None, onednn: Claim | None
) -> list[Claim]:
    """The libraries and our templates; those first that are predicted to be fastest."""
    if config.numerics == "eager" and blas is not None:
        return [blas]
    if not _onednn_serves(node):
        onednn = None
    order = [onednn, blas] if prefers_onednn(node) and not _blas_first(node) else [blas, onednn]
    tiles, few = gemm(label, node), gemv(label, node)
    order = [tiles, *order] if prefers_tiles(node) else [*order, tiles]
    pairs = gemm_pairs(label, node)
    order = [few, pairs, *order] if _is_worth_a_unit(node) else [*order, few, pairs]
    return _for_rows_that_vary(label, node, [claim for claim in order if claim is not None])


def _for_rows_that_vary(label: str, node: fx.Node, order: list[Claim]) -> list[Claim]:
    """With the first claim as what serves many rows, where calls may also have few, whose template is worth
    it."""
    both = gemv_or(label, node, order[0]) if order and _is_worth_a_unit(node) else None
    return order if both is None else [both, *order]


def _from_memory(node: fx.Node) -> bool:
    """Whether an operand comes from memory: its reading is what a product of few rows takes its time for, and
    a template's unit is worth compiling."""
    vals = [a.meta["val"] for a in node.all_input_nodes]
    return any(size_hint(v.numel()) * v.element_size() >= FEW_BYTES for v in vals)


def _is_worth_a_unit(node: fx.Node) -> bool:
    """Whether the templates for few rows are worth compiling: weights come from memory, or it would be tiles,
    which are compiled too and take longer (one row of bf16, 192 columns, depth 576: 40 us for 4; one-off
    script)."""
    return _from_memory(node) or prefers_tiles(node)


def _blas_first(node: fx.Node) -> bool:
    """Whether ATen's own call, which writes where the plan says, comes before oneDNN's with an epilogue, that
    allocates. In bf16 oneDNN serves both, and without a bias the first is nowhere slower; a bias it adds in
    a pass of its own. Of a left operand that lies by columns, as in gradients of weights, the other makes a
    copy (scripts/products.py)."""
    at, left = operands_of(node), _left(node)
    biased = at is not None and at.bias is not None and argument(node, at.bias, "bias", None) is not None
    return not known_equal(left.stride(-1), 1) or (left.dtype == torch.bfloat16 and not biased)


def addmm(node: fx.Node, config: Config) -> list[Claim]:
    if dtype_of(node) not in (*FLOATS, torch.float64):
        return []
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
    at = operands_of(node)
    blas = Claim(
        "addmm: BLAS",
        lambda w, c: w.call(
            c,
            SHIM + "addmm_out",
            [
                w.output(c.outputs[0]),
                *(w.tensor(a) for a in c.args[:3]),
                repr(float(beta)),  # type: ignore[arg-type]
                repr(float(alpha)),  # type: ignore[arg-type]
            ],
        ),
        out=True,
        prepare=_as_traced(1, 2),
    )
    if at is None or at.bias is None:
        return _ordered("addmm", node, config, blas, None)
    onednn = Claim(
        "addmm: oneDNN",
        lambda w, c: _linear_call(w, c, c.args[1], transposed(c.args[2]), c.args[0], None, "none"),
        prepare=_operands(0, weight=2),
    )
    return _ordered("addmm", node, config, blas, onednn)


def bmm(node: fx.Node, config: Config) -> list[Claim]:
    if dtype_of(node) not in (*FLOATS, torch.float64):
        return []
    blas = Claim(
        "bmm: BLAS",
        lambda w, c: w.call(
            c, SHIM + "bmm_out", [w.output(c.outputs[0]), w.tensor(c.args[0]), w.tensor(c.args[1])]
        ),
        out=True,
        prepare=_as_traced(0, 1),
    )
    return _ordered("bmm", node, config, blas, None)


def baddbmm(node: fx.Node, config: Config) -> list[Claim]:
    if dtype_of(node) not in (*FLOATS, torch.float64):
        return []
    beta, alpha = (repr(float(node.kwargs.get(k, 1))) for k in ("beta", "alpha"))  # type: ignore[arg-type]
    blas = Claim(
        "baddbmm: BLAS",
        lambda w, c: w.call(
            c, SHIM + "baddbmm_out", [w.output(c.outputs[0]), *(w.tensor(a) for a in c.args[:3]), beta, alpha]
        ),
        out=True,
        prepare=_as_traced(1, 2),
    )
    return _ordered("baddbmm", node, config, blas, None)


def reads_weights(node: fx.Node) -> bool:
    """Whether a product has few rows and a weight that comes from memory."""
    return gemv("product", node) is not None and _from_memory(node)


def prefers_pairs(node: fx.Node) -> bool:
    """Whether tiles of pairs serve a product better than the libraries do."""
    return gemm_pairs("product", node) is not None and _from_memory(node)


PANELS = repr(("panels",))
PANEL_DEPTH = 768
"""Depth from which on tiles of packed weights take as long as oneDNN."""


def packs(node: fx.Node) -> str | None:
    """The form that the weight of a dicp::linear, if it is constant, had better have: that of our tiles or
    oneDNN's own; None where it had better lie as it does."""
    if prefers_panels(node):
        return PANELS
    x = _left(node)
    rows = math.prod(size_hint(n) for n in x.shape[:-1])
    if rows < PACKED_ROWS if x.dtype == torch.float32 else reads_weights(node):
        return None
    if prefers_packed_mkl(node):
        return repr((MKL, rows))
    if not prefers_onednn(node):
        return None
    return None if result_is_large(node) and prefers_tiles(node) else repr(("linear", rows))


MKL = "mkl"


def _is_mkls(form: str | None) -> bool:
    return form is not None and ast.literal_eval(form)[0] == MKL


def prefers_packed_mkl(node: fx.Node) -> bool:
    """Whether MKL serves a product of a constant weight best, which it then has in its own form: in float32
    on Intel (256 rows of 768 by 3072: 331 GF/s, 294 by oneDNN's packed weights, 265 unpacked). Its call has
    nothing behind the sum but a bias."""
    plain = argument(node, 4, "act", "none") == "none" and argument(node, 3, "other", None) is None
    if not plain or cpu_maker() != "intel" or not packed_mkl.available():
        return False
    x, w = _left(node), node.args[1].meta["val"]  # type: ignore[union-attr]
    return x.dtype == torch.float32 and known_true(w.numel() > 0)


def prefers_panels(node: fx.Node) -> bool:
    """Whether tiles of bf16 serve a product of a constant weight better than oneDNN does: where the result
    is large, which oneDNN would allocate, or what follows is not oneDNN's (ReLU, or an activation and a sum),
    unless the depth is so small that writing and reading the sums takes long."""
    x, at = _left(node), operands_of(node)
    if at is None or not x.dtype == dtype_of(node) == torch.bfloat16 or not available(torch.bfloat16):
        return False
    depth = x.shape[-1]
    if reads_weights(node) or not isinstance(depth, int) or depth % 2 or depth < PANEL_DEPTH:
        return False
    return result_is_large(node) or not _onednn_serves(node)


def _as_traced(*positions: int) -> Callable[..., Sequence[Any]]:
    return lambda lowering, node, args: as_traced(lowering, node, args, *positions)


def _operands(*positions: int, weight: int) -> Callable[..., Sequence[Any]]:
    """Dense operands at `positions`, and a weight of which one dim is: oneDNN refuses the strides of some
    others (rows that overlap with those before), and copies all."""
    as_dense = dense(*positions)

    def prepare(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
        args = list(as_dense(lowering, node, args))
        view = as_traced(lowering, node, args, weight)[weight]
        view = lowering.operand(view)
        args[weight] = view if _nests(view) else lowering.operand(args[weight], dense=True)
        return args

    return prepare


def _nests(v: View) -> bool:
    """Whether a matrix is rows, or columns, one behind the other, for all of its sizes."""
    for inner, outer in ((-1, -2), (-2, -1)):
        if v.strides[inner] == 1 or v.shape[inner] == 1:
            if v.shape[outer] == 1 or ix.nonnegative(v.strides[outer] - v.shape[inner]):
                return True
    return False


def linear(node: fx.Node, config: Config) -> list[Claim]:
    act = argument(node, 4, "act", "none")

    def onednn(w: Any, c: Call) -> None:
        bias, other = (c.args[k] if len(c.args) > k else None for k in (2, 3))
        _linear_call(w, c, c.args[0], c.args[1], bias, other, act)

    library = Claim("linear: oneDNN", onednn, prepare=_operands(2, 3, weight=1))
    form = node.args[1].meta.get(PACKED)  # type: ignore[union-attr]
    if form is not None:
        if _is_mkls(form):
            return [packed_mkl.packed_mkl(node)]
        return [gemm_packed(node) if form == PANELS else library]
    plain = act == "none" and argument(node, 3, "other", None) is None
    blas = Claim("linear: BLAS", _linear_by_blas, out=True, prepare=dense(0, 2)) if plain else None
    return _ordered("linear", node, config, blas, library)


def unfuses_bias(node: fx.Node) -> bool:
    """Whether a product is MKL's and a kernel behind it had better add the bias, which torch writes into the
    result for MKL to add to: 1,576 rows of 768 by 3,072 are multiplied at 300 GF/s with one and at 320
    without, packed 311 and 328 (two Intel cores of the 5th generation)."""
    if cpu_maker() != "intel" or dtype_of(node) != torch.float32 or not _kernel_follows(node):
        return False
    if node.target is torch.ops.dicp.linear.default:
        return is_constant(node.args[1]) and _is_mkls(packs(node))
    biased = node.args[0].meta["val"].dim() == 1  # type: ignore[union-attr]
    return biased and not (prefers_tiles(node) or reads_weights(node))


def _kernel_follows(node: fx.Node) -> bool:
    """Whether all that reads a value does so element by element."""
    rows = table()

    def reads(user: fx.Node) -> bool:
        if user.target is aten.view.default:
            return _kernel_follows(user)
        row = rows.get(user.target)
        return row is not None and row.kind == "elementwise"

    return bool(node.users) and all(map(reads, node.users))


def _linear_by_blas(w: Any, c: Call) -> None:
    """As a product of matrices: leading dims of x and y are one."""
    x, weight, bias = c.args[0], c.args[1], c.args[2] if len(c.args) > 2 else None
    y = c.outputs[0]
    matrices = [
        View(v.buffer, (ix.product(v.shape[:-1]), v.shape[-1]), (v.shape[-1], 1), v.offset)
        for v in (View(y, y.shape, y.strides), x)
    ]
    out, rows = (w.tensor(m) for m in matrices)
    columns = w.tensor(transposed(weight))
    if bias is None:
        w.call(c, SHIM + "mm_out", [out, rows, columns])
    else:
        w.call(c, SHIM + "addmm_out", [out, w.tensor(bias), rows, columns, "1.0", "1.0"])


def scaled_linear(node: fx.Node, config: Config | None) -> list[Claim]:
    """Of weights of eight bits, which no library reads. Where oneDNN multiplies a low precision, it gets them
    cast, unless rows seem to be few."""
    few, tiles = gemv("narrow linear", node), gemm("narrow linear", node)
    dtype = dtype_of(node)
    if dtype in LOW and multiplies(dtype) and not seems_few(node):
        tiles = None
    return _for_rows_that_vary("narrow linear", node, [claim for claim in (few, tiles) if claim is not None])


def _linear_call(
    w: Any, c: Call, x: View, weight: View, bias: View | None, other: View | None, act: str
) -> None:
    if other is not None:
        assert act == "none", "oneDNN's call has an activation or a sum behind it"
        args = [w.tensor(x), w.tensor(other), w.tensor(weight), w.optional(bias), '"add"']
        w.call(c, SHIM + "_linear_pointwise_binary", args)
        return
    w.call(
        c, SHIM + "_linear_pointwise", [w.tensor(x), w.tensor(weight), w.optional(bias), *activation(w, act)]
    )

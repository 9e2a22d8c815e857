"""Attention: by tiles of our own around oneDNN's micro-kernels, or by ATen's flash kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import known_equal, size_hint
from dicp.config import Config
from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph.claims.common import (
    FLOATS,
    LOW,
    SHIM,
    argument,
    dtype_of,
    memory_order,
    multiplies,
    rows,
)
from dicp.vendor.cpu_graph.expression import STORAGE, literal
from dicp.vendor.cpu_graph.microkernels import available


def attention_args(w: Any, mask: View | None, scale: float | None) -> list[str]:
    out = [w.optional(mask)]
    if scale is None:
        return [*out, "nullptr"]
    w.lines.append(f"double scale = {literal(float(scale), torch.float64)};")
    return [*out, "&scale"]


def _attention_strides(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Any:
    """The library's answer lies in memory as the query does."""
    from dicp.schedule.strides import dense_strides

    val = node.meta["val"]
    vals = val if isinstance(val, (tuple, list)) else [val]
    shape = tuple(lowering.index(s) for s in vals[0].shape)
    return [dense_strides(shape, memory_order(args[0])), *[None] * (len(vals) - 1)]


# -- tiles -------------------------------------------------------------------------------------------------

FEW_ROWS = 32
"""Query rows under which each key would be brought into tile order for too few products."""
DECODED_ROWS = 8
"""Query rows up to which keys and values are read as they lie, once for all of them: tiles bring nothing to
so few products. scripts/decode.py times a model whose steps are such."""
FEW_BYTES = 1 << 13
"""Bytes of keys under which what the template saves is not worth compiling its unit: of 30 keys or of 160,
20 us a call (one row, 3 to 9 heads of 64; two Intel cores, one-off script)."""

_TILES = ("dicp_attention.h", "flash_attention")
_ROWS = ("dicp_attention_rows.h", "row_attention")
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_PARAMETERS = (
    "const {T}* q, const {T}* k, const {T}* v, const {M}* mask, {T}* out, float* log_sum, "
    "const int64_t* sizes, double scale, bool causal"
)
_SOURCE = """\
#include "{header}"
using namespace dicp;

// softmax(scale Q K^T + mask) V
DICP_EXPORT int32_t {name}({parameters}) {{
  return {function}{types}(q, k, v, mask, out, log_sum, sizes, scale, causal);
}}
"""


def multiplied(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of the tiles' products: the operands', or float32 where the processor has nothing for a low
    precision; None where there are no micro-kernels for it."""
    product = torch.float32 if dtype in LOW and not multiplies(dtype) else dtype
    return product if available(product) else None


def _tiled(node: fx.Node, mask: Any, causal: bool, scale: float | None) -> Claim | None:
    """The claim by tiles, where the micro-kernels and the tiles' layout allow."""
    q, _, v = (a.meta["val"] for a in node.args[:3])  # type: ignore[union-attr]
    depths = (q.shape[-1], v.shape[-1])
    product = multiplied(q.dtype)
    if product is None or size_hint(q.shape[2]) < FEW_ROWS or not addressed(node.args[:3], mask):
        return None
    if not all(d % 2 == 0 and d <= 256 for d in depths):
        return None
    emit = _emit(*_TILES, causal, scale, product)
    return Claim("attention: tiles", emit, out=True, prepare=_tile_rows)


def _by_rows(node: fx.Node, mask: Any, causal: bool, scale: float | None) -> Claim | None:
    """The claim for few query rows, as in decoding."""
    q, k = (a.meta["val"] for a in node.args[:2])  # type: ignore[union-attr]
    rows, nbytes = q.shape[2], size_hint(k.numel(), FEW_BYTES) * k.element_size()
    if not isinstance(rows, int) or rows > DECODED_ROWS or nbytes < FEW_BYTES:
        return None
    if not addressed(node.args[:3], mask):
        return None
    emit = _emit(*_ROWS, causal, scale)
    return Claim("attention: few rows", emit, out=True, prepare=_tile_rows)


def is_forward(node: fx.Node) -> bool:
    """Whether a node is a call of attention, not of its gradients."""
    return node.target in (torch.ops.dicp.attention.default, _FLASH)


def reads_operands(node: fx.Node) -> bool:
    """Whether a template serves a call, which reads operands of a low precision as they are."""
    if node.target is _FLASH:
        mask, dropout = node.kwargs.get("attn_mask"), argument(node, 3, "dropout_p", 0.0)
    else:
        mask, dropout = argument(node, 3, "mask", None), 0.0
    return dropout == 0.0 and bool(_templates(node, mask, False, None))


def addressed(operands: Sequence[Any], mask: Any) -> bool:
    """Whether the templates read operands of these dtypes, and know their heads and depths."""
    q, k, v = (a.meta["val"] for a in operands)
    if q.dtype not in FLOATS or (mask is not None and mask.meta["val"].dtype not in (q.dtype, torch.float32)):
        return False
    return all(isinstance(n, int) for n in (q.shape[1], k.shape[1], q.shape[-1], v.shape[-1]))


def _tile_rows(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
    return [*(dense_depth(lowering, a) for a in args[:3]), *args[3:]]


def dense_depth(lowering: Any, operand: Any) -> Any:
    """An operand whose depth is dense, and whose rows start at pairs of 16-bit values."""
    view = lowering.operand(operand)
    row = view.strides[2]
    pairs = view.buffer.dtype.itemsize == 4 or (isinstance(row, int) and row % 2 == 0)
    return view if view.strides[-1] == 1 and pairs else lowering.operand(operand, dense=True)


def _emit(
    header: str, function: str, causal: bool, scale: float | None, product: torch.dtype | None = None
) -> Callable[[Any, Call], None]:
    """The call of a template. `product`: what its micro-kernels multiply, where it has such."""

    def emit(w: Any, c: Call) -> None:
        q, k, v = c.args[:3]
        given = [*c.args[3:4], c.kwargs.get("attn_mask")]  # of dicp::attention, of ATen's op
        added = next((x for x in given if isinstance(x, View)), None)
        out, log_sum = c.outputs[0], c.outputs[1] if len(c.outputs) > 1 else None
        name, parameters, source = _unit(header, function, q.buffer.dtype, (added or q).buffer.dtype, product)
        w.template(name, parameters, source)
        sizes, _ = w.ints(
            [*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]]
            + [s for x in (q, k, v, out) for s in x.strides[:3]]
            + list(log_sum.strides if log_sum is not None else (0, 0, 0))
            + (mask_strides(added) if added is not None else [0, 0, 0, 0])
        )
        pointers = [w.pointer_to(x) for x in (q, k, v, added)]
        pointers += [w.pointer(out), w.pointer(log_sum) if log_sum is not None else "nullptr"]
        factor = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
        w.call(c, name, [*pointers, sizes, literal(factor, torch.float64), str(causal).lower()])

    return emit


def _unit(
    header: str, function: str, dtype: torch.dtype, mask: torch.dtype, product: torch.dtype | None
) -> tuple[str, str, str]:
    """Name, parameters and source of a template's function."""
    kinds = {"T": STORAGE[dtype], "M": STORAGE[mask]}
    name = "_".join([function, *dict.fromkeys(kinds.values())])
    types = [*([STORAGE[product]] if product else []), *kinds.values()]
    parameters = _PARAMETERS.format(**kinds)
    source = _SOURCE.format(
        name=name, parameters=parameters, header=header, function=function, types=f"<{', '.join(types)}>"
    )
    return name, parameters, source


def tiles_unit(dtype: torch.dtype, mask: torch.dtype) -> tuple[str, str, str] | None:
    """The same of tiles for operands and a mask (or operands again) of these dtypes; None without them."""
    product = multiplied(dtype)
    return None if product is None else _unit(*_TILES, dtype, mask, product)


def rows_unit(dtype: torch.dtype, mask: torch.dtype) -> tuple[str, str, str]:
    """The same for few query rows."""
    return _unit(*_ROWS, dtype, mask, None)


def mask_strides(mask: View) -> list[Any]:
    """Per batch, head, row and column; 0 where the mask is broadcast."""
    own = [0 if n == 1 else s for n, s in zip(mask.shape, mask.strides, strict=True)]
    return [0] * (4 - len(own)) + own


# -- claims ------------------------------------------------------------------------------------------------


def _templates(node: fx.Node, mask: Any, causal: bool, scale: float | None) -> list[Claim]:
    """The claims by templates, which are ahead of ATen's kernels where there is one."""
    found = [_by_rows(node, mask, causal, scale), _tiled(node, mask, causal, scale)]
    return [claim for claim in found if claim is not None]


def supports(node: fx.Node) -> bool:
    """Whether a dicp::attention may be formed: a template or ATen's kernels serve it."""
    return dtype_of(node.args[0]) in FLOATS and (_one_depth(node) or reads_operands(node))


def _one_depth(node: fx.Node) -> bool:
    """Whether values are as deep as keys, as ATen's kernels ask."""
    q, _, v = (a.meta["val"] for a in node.args[:3])  # type: ignore[union-attr]
    return known_equal(q.shape[-1], v.shape[-1])


def attention(node: fx.Node, config: Config) -> list[Claim]:
    causal, scale = argument(node, 4, "causal", False), argument(node, 5, "scale", None)

    def emit(w: Any, c: Call) -> None:
        q, k, v, mask = c.args[:4]
        head = [
            w.tensor(q),
            w.tensor(k),
            w.tensor(v),
            "0.0",
            str(int(causal)),
            *attention_args(w, None if mask is None else _four_dims(mask), scale),
        ]
        logsumexp = w.fresh("logsumexp")
        w.hoisted.append(f"Tensor {logsumexp};")
        w.call(c, SHIM + "_scaled_dot_product_flash_attention_for_cpu", head, extra=[f"&{logsumexp}.h"])

    library = Claim("attention: flash", emit, strides=_attention_strides, prepare=rows(0, 1, 2, 3))
    own = [] if config.numerics == "eager" else _templates(node, node.args[3], causal, scale)
    return [*own, library] if _one_depth(node) else own


def _four_dims(mask: View) -> View:
    """The mask as ATen's kernels take it: of three dims, or one, they do not."""
    missing = 4 - len(mask.shape)
    return replace(mask, shape=(*[1] * missing, *mask.shape), strides=(*[0] * missing, *mask.strides))


def flash(node: fx.Node, config: Config) -> list[Claim]:
    p, causal = argument(node, 3, "dropout_p", 0.0), argument(node, 4, "is_causal", False)
    mask, scale = node.kwargs.get("attn_mask"), node.kwargs.get("scale")

    def emit(w: Any, c: Call) -> None:
        q, k, v = c.args[:3]
        w.call(
            c,
            SHIM + "_scaled_dot_product_flash_attention_for_cpu",
            [
                w.tensor(q),
                w.tensor(k),
                w.tensor(v),
                repr(float(p)),
                str(int(causal)),
                *attention_args(w, c.kwargs.get("attn_mask"), scale),
            ],
        )

    library = Claim("attention: flash", emit, strides=_attention_strides, prepare=rows(0, 1, 2))
    own = p == 0.0 and config.numerics != "eager"
    return [*(_templates(node, mask, causal, scale) if own else []), library]

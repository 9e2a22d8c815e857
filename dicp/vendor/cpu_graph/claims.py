"""What cpu_graph gives to libraries: GEMM, convolution, attention, pooling, sorting; and which library
serves it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import known_equal, size_hint
from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim

aten = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHIM = "aoti_torch_cpu_"
ACTIVATIONS = {
    "none": ("none", None),
    "relu": ("relu", None),
    "sigmoid": ("sigmoid", None),
    "tanh": ("tanh", None),
    "silu": ("swish", None),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
}


@functools.cache
def cpu_maker() -> str:
    """ "amd", "intel" or "other"."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return "other"
    return "amd" if "AuthenticAMD" in text else "intel" if "GenuineIntel" in text else "other"


def prefers_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN serves a GEMM of this dtype better than MKL does.

    MKL runs fp32 at half of an AMD core's peak, oneDNN at 95 %; on Intel MKL is at the peak. bf16 goes to
    oneDNN
    everywhere.
    """
    return torch.backends.mkldnn.is_available() and (
        dtype == torch.bfloat16 or (dtype == torch.float32 and cpu_maker() == "amd")
    )


def claim_for(node: fx.Node, eager: bool = False) -> Claim | None:
    """The library call for a node. `eager`: the one that eager makes, so that results have its bits."""
    make = _table().get(node.target)
    if make is None or _empty(node):
        return None
    return make(node, eager) if make in (_mm, _addmm) else make(node)


def _empty(node: fx.Node) -> bool:
    """Whether an operand has no elements: libraries differ on what that means."""
    vals = [a.meta.get("val") for a in node.all_input_nodes]
    return any(isinstance(n, int) and n == 0 for v in vals if isinstance(v, torch.Tensor) for n in v.shape)


def _dtype(x: Any) -> torch.dtype | None:
    val = x.meta.get("val") if isinstance(x, fx.Node) else None
    return val.dtype if isinstance(val, torch.Tensor) else None


def _transposed(v: View) -> View:
    return View(
        v.buffer,
        (*v.shape[:-2], v.shape[-1], v.shape[-2]),
        (*v.strides[:-2], v.strides[-1], v.strides[-2]),
        v.offset,
    )


def _act(w: Any, act: str) -> list[str]:
    """Arguments for an activation: name, scalars, their number, algorithm."""
    name, algorithm = ACTIVATIONS[act]
    if algorithm is None:
        return [f'"{name}"', "nullptr", "0", "nullptr"]
    text = w.fresh("algorithm")
    w.lines.append(f'const char* {text} = "{algorithm}";')
    return [f'"{name}"', "nullptr", "0", f"&{text}"]


def _dense(*positions: int) -> Callable[..., Sequence[Any]]:
    """Prepare operands that the library reads as if they were dense (it ignores their strides)."""

    def prepare(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
        return [
            lowering.operand(a, dense=True) if k in positions and a is not None else a
            for k, a in enumerate(args)
        ]

    return prepare


def _rows(*positions: int) -> Callable[..., Sequence[Any]]:
    """Prepare operands whose last dim must be contiguous."""

    def prepare(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
        def fix(a: Any) -> Any:
            view = lowering.operand(a)
            return view if view.strides[-1] == 1 else lowering.operand(a, dense=True)

        return [fix(a) if k in positions and a is not None else a for k, a in enumerate(args)]

    return prepare


# -- GEMM --------------------------------------------------------------------------------------------------


def _mm(node: fx.Node, eager: bool) -> Claim | None:
    if _dtype(node) not in (*FLOATS, torch.float64):
        return None
    if not eager and prefers_onednn(_dtype(node)) and not _for_blas(node):  # type: ignore[arg-type]
        return Claim(
            "mm: oneDNN",
            lambda w, c: _linear_call(w, c, c.args[0], _transposed(c.args[1]), None, None, "none"),
        )
    return Claim(
        "mm: BLAS",
        lambda w, c: w.call(
            c, SHIM + "mm_out", [w.output(c.outputs[0]), w.tensor(c.args[0]), w.tensor(c.args[1])]
        ),
        out=True,
    )


LARGE_RESULT = 1 << 20
MANY_ROWS = 1024  # with 128 rows and a transposed weight MKL reaches 60 to 85 % of oneDNN; with 6272, 95 %


def _for_blas(node: fx.Node) -> bool:
    """Whether a product goes to BLAS where oneDNN is as fast: oneDNN copies a transposed left operand, and
    allocates its result, which costs more than it gains where that is large."""
    left, result = node.args[-2].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    rows, nbytes = size_hint(result.shape[0]), size_hint(result.numel()) * result.element_size()
    return left.stride(-1) != 1 or (nbytes >= LARGE_RESULT and rows >= MANY_ROWS)


def _addmm(node: fx.Node, eager: bool) -> Claim | None:
    if _dtype(node) not in (*FLOATS, torch.float64):
        return None
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
    bias = node.args[0].meta["val"]  # type: ignore[union-attr]
    columns = node.meta["val"].shape[-1]
    plain = bias.dim() == 1 and known_equal(bias.shape[0], columns) and beta == 1 and alpha == 1
    if not eager and plain and prefers_onednn(_dtype(node)) and not _for_blas(node):  # type: ignore[arg-type]
        return Claim(
            "addmm: oneDNN",
            lambda w, c: _linear_call(w, c, c.args[1], _transposed(c.args[2]), c.args[0], None, "none"),
            prepare=_dense(0),
        )
    return Claim(
        "addmm: BLAS",
        lambda w, c: w.call(
            c,
            SHIM + "addmm_out",
            [
                w.output(c.outputs[0]),
                *(w.tensor(a) for a in c.args[:3]),
                repr(float(beta)),  # type: ignore[arg-type]
                repr(float(alpha)),
            ],
        ),
        out=True,
    )  # type: ignore[arg-type]


def _bmm(node: fx.Node) -> Claim | None:
    if _dtype(node) not in (*FLOATS, torch.float64):
        return None
    return Claim(
        "bmm: BLAS",
        lambda w, c: w.call(
            c, SHIM + "bmm_out", [w.output(c.outputs[0]), w.tensor(c.args[0]), w.tensor(c.args[1])]
        ),
        out=True,
    )


def _baddbmm(node: fx.Node) -> Claim | None:
    if _dtype(node) not in (*FLOATS, torch.float64):
        return None
    beta, alpha = (repr(float(node.kwargs.get(k, 1))) for k in ("beta", "alpha"))  # type: ignore[arg-type]
    return Claim(
        "baddbmm: BLAS",
        lambda w, c: w.call(
            c, SHIM + "baddbmm_out", [w.output(c.outputs[0]), *(w.tensor(a) for a in c.args[:3]), beta, alpha]
        ),
        out=True,
    )


def _linear(node: fx.Node) -> Claim | None:
    x, weight, bias, other = (*node.args, None, None, None, None)[:4]
    act = _argument(node, 4, "act", "none")
    return Claim(
        "linear: oneDNN",
        lambda w, c: _linear_call(
            w,
            c,
            c.args[0],
            c.args[1],
            c.args[2] if len(c.args) > 2 else None,
            c.args[3] if len(c.args) > 3 else None,
            act,
        ),
        prepare=_dense(2, 3),
    )


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _linear_call(
    w: Any, c: Call, x: View, weight: View, bias: View | None, other: View | None, act: str
) -> None:
    if other is not None:
        args = [w.tensor(x), w.tensor(other), w.tensor(weight), w.optional(bias), '"add"']
        w.call(c, SHIM + "_linear_pointwise_binary", args)
        return
    w.call(c, SHIM + "_linear_pointwise", [w.tensor(x), w.tensor(weight), w.optional(bias), *_act(w, act)])


# -- convolution -------------------------------------------------------------------------------------------


FEW_POSITIONS = 256
"""Positions under which oneDNN's convolutions lose to gathering the windows: 98 positions of 512 channels,
3x3, take it 4.1 ms forward and 16 ms for the weight's gradient; a product of those sizes takes 2.5 ms, its
gathering 1.3 ms (2 Zen 4 cores)."""


def matmul_pays(part: str, conv: Any) -> bool:
    """Products with a 1x1 window run at the library's peak either way; as GEMM they write where the program
    wants them, where a convolution allocates its results and reorders its weights at each call."""
    if conv.dtype != torch.float32:
        return False
    return conv.pointwise or (part != "input" and conv.positions < FEW_POSITIONS)


def _lists(w: Any, *lists: Sequence[int]) -> list[str]:
    out: list[str] = []
    for values in lists:
        name, n = w.ints(values)
        out += [name, str(n)]
    return out


def _channels_last(v: View) -> bool:
    """Whether dims lie in memory as [batch, *spatial, channels], as far as strides are numbers."""
    order = _memory_order(v)
    return len(order) in (4, 5) and order == (0, *range(2, len(order)), 1)


def _conv_strides(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Any:
    """Convolutions answer in channels-last when the input or the weight is; else as traced."""
    from dicp.schedule.strides import dense_strides

    val = node.meta["val"]
    first = val[0] if isinstance(val, (tuple, list)) else val
    x = args[0] if not isinstance(val, (tuple, list)) else args[1]
    if not isinstance(first, torch.Tensor) or first.dim() not in (4, 5):
        return None
    last = (
        _channels_last(x)
        or _channels_last(args[1] if x is args[0] else args[2])
        or (isinstance(val, (tuple, list)) and _channels_last(args[0]))
    )
    n = first.dim()
    order = (0, *range(2, n), 1) if last else tuple(range(n))

    def strides(v: Any) -> Any:
        if not isinstance(v, torch.Tensor):
            return None
        sizes = tuple(lowering.index(s) for s in v.shape)
        return dense_strides(sizes, order if v.dim() == n else tuple(range(v.dim())))

    vals = val if isinstance(val, (tuple, list)) else [val]
    return [strides(v) for v in vals]


def _in_layout(lowering: Any, node: fx.Node, args: Sequence[Any], k: int) -> Any:
    """Operand k stored in the layout that the layout pass chose for it, or the one it was traced with."""
    from dicp.schedule.strides import order_of

    source = node.args[k]
    if not isinstance(source, fx.Node):
        return args[k]
    if "dicp_layout" in source.meta:
        return lowering.in_order(args[k], source.meta["dicp_layout"])
    return lowering.operand(args[k], order=order_of(source.meta["val"]))


def _prepare_conv(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
    count = 3 if node.target is aten.convolution_backward.default else 1
    wanted = [_in_layout(lowering, node, args, k) for k in range(count)]
    if count == 3 and len(wanted[1].shape) == 4 and _channels_last(wanted[1]):
        wanted[2] = lowering.in_order(wanted[2], (0, 2, 3, 1))  # which the library would do, more slowly
    rest = (
        args[count:] if count == 3 else _dense(2)(lowering, node, args)[1:]
    )  # the bias of a forward convolution
    return (*wanted, *rest)


def _convolution(node: fx.Node) -> Claim | None:
    if _dtype(node) not in (*FLOATS, torch.float64):
        return None

    def emit(w: Any, c: Call) -> None:
        x, weight, bias, stride, pad, dilation, transposed, opad, groups = c.args
        head = [w.tensor(x), w.tensor(weight), w.optional(bias)]
        w.call(
            c,
            SHIM + "convolution",
            [
                *head,
                *_lists(w, stride, pad, dilation),
                str(int(transposed)),
                *_lists(w, opad),
                w.text(groups),
            ],
        )

    return Claim("convolution: oneDNN", emit, strides=_conv_strides, prepare=_prepare_conv)


def _conv(node: fx.Node) -> Claim | None:
    act = _argument(node, 8, "act", "none")

    def emit(w: Any, c: Call) -> None:
        x, weight, bias, other, stride, pad, dilation, groups = c.args[:8]
        if other is None:
            w.call(
                c,
                SHIM + "mkldnn__convolution_pointwise",
                [
                    w.tensor(x),
                    w.tensor(weight),
                    w.optional(bias),
                    *_lists(w, pad, stride, dilation),
                    w.text(groups),
                    *_act(w, act),
                ],
            )
            return
        w.lines.append("double alpha = 1.0;")
        name = "nullptr"
        if act != "none":
            w.lines.append(f'const char* act = "{ACTIVATIONS[act][0]}";')
            name = "&act"
        w.call(
            c,
            SHIM + "mkldnn__convolution_pointwise_binary",
            [
                w.tensor(x),
                w.tensor(other),
                w.tensor(weight),
                w.optional(bias),
                *_lists(w, pad, stride, dilation),
                w.text(groups),
                '"add"',
                "&alpha",
                name,
                "nullptr",
                "0",
                "nullptr",
            ],
        )

    def prepare(lowering: Any, n: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
        wanted = list(_dense(2)(lowering, n, args))
        for k in (0, 3):
            if wanted[k] is not None:
                wanted[k] = _in_layout(lowering, n, args, k)
        if wanted[3] is not None and "dicp_layout" in n.meta:
            wanted[3] = lowering.in_order(wanted[3], n.meta["dicp_layout"])
        return wanted

    return Claim("conv: oneDNN", emit, strides=_conv_strides, prepare=prepare)


def _convolution_backward(node: fx.Node) -> Claim | None:
    if _dtype(node.args[0]) not in (*FLOATS, torch.float64):
        return None

    def emit(w: Any, c: Call) -> None:
        grad, x, weight, bias_sizes, stride, pad, dilation, transposed, opad, groups, mask = c.args
        handles = [w.tensor(grad), w.tensor(x), w.tensor(weight)]
        if bias_sizes is None:
            bias = ["nullptr", "0"]
        else:
            name, n = w.ints(bias_sizes)
            w.lines.append(f"const int64_t* bias_sizes = {name};")
            bias = ["&bias_sizes", str(n)]
        w.lines.append(f"const int32_t mask[] = {{{', '.join(str(int(m)) for m in mask)}}};")
        tail = [
            *_lists(w, stride, pad, dilation),
            str(int(transposed)),
            *_lists(w, opad),
            w.text(groups),
            "mask",
            "3",
        ]
        w.call(c, SHIM + "convolution_backward", [*handles, *bias, *tail])

    return Claim("convolution_backward: oneDNN", emit, strides=_conv_strides, prepare=_prepare_conv)


# -- attention ---------------------------------------------------------------------------------------------


def _attention_args(w: Any, mask: View | None, scale: float | None) -> list[str]:
    out = [w.optional(mask)]
    if scale is None:
        return [*out, "nullptr"]
    w.lines.append(f"double scale = {float(scale)!r};")
    return [*out, "&scale"]


def _attention_strides(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Any:
    """The library's answer lies in memory as the query does."""
    from dicp.schedule.strides import dense_strides

    val = node.meta["val"]
    vals = val if isinstance(val, (tuple, list)) else [val]
    shape = tuple(lowering.index(s) for s in vals[0].shape)
    return [dense_strides(shape, _memory_order(args[0])), *[None] * (len(vals) - 1)]


def _memory_order(v: View) -> tuple[int, ...]:
    """Dims from outermost to innermost, as far as the strides are numbers; row-major otherwise."""
    if not all(isinstance(s, int) for s in v.strides):
        seq_first = len(v.shape) == 4 and v.strides[1] == v.shape[3]
        return (0, 2, 1, 3) if seq_first else tuple(range(len(v.shape)))
    return tuple(sorted(range(len(v.shape)), key=lambda d: (-v.strides[d], d)))  # type: ignore[operator]


def _attention(node: fx.Node) -> Claim | None:
    causal, scale = _argument(node, 4, "causal", False), _argument(node, 5, "scale", None)

    def emit(w: Any, c: Call) -> None:
        q, k, v, mask = c.args[:4]
        head = [
            w.tensor(q),
            w.tensor(k),
            w.tensor(v),
            "0.0",
            str(int(causal)),
            *_attention_args(w, mask, scale),
        ]
        logsumexp = w.fresh("logsumexp")
        w.hoisted.append(f"Tensor {logsumexp};")
        w.call(c, SHIM + "_scaled_dot_product_flash_attention_for_cpu", head, extra=[f"&{logsumexp}.h"])

    return Claim("attention: flash", emit, strides=_attention_strides, prepare=_rows(0, 1, 2, 3))


def _flash(node: fx.Node) -> Claim | None:
    def emit(w: Any, c: Call) -> None:
        q, k, v = c.args[:3]
        p, causal = (*c.args[3:5], 0.0, False)[:2] if len(c.args) > 3 else (0.0, False)
        if len(c.args) == 4:
            causal = False
        mask, scale = c.kwargs.get("attn_mask"), c.kwargs.get("scale")
        w.call(
            c,
            SHIM + "_scaled_dot_product_flash_attention_for_cpu",
            [
                w.tensor(q),
                w.tensor(k),
                w.tensor(v),
                repr(float(p)),
                str(int(causal)),
                *_attention_args(w, mask, scale),
            ],
        )

    return Claim("attention: flash", emit, strides=_attention_strides, prepare=_rows(0, 1, 2))


def _flash_backward(node: fx.Node) -> Claim | None:
    def emit(w: Any, c: Call) -> None:
        tensors, p, causal = c.args[:6], c.args[6], c.args[7]
        w.call(
            c,
            SHIM + "_scaled_dot_product_flash_attention_for_cpu_backward",
            [
                *(w.tensor(t) for t in tensors),
                repr(float(p)),
                str(int(causal)),
                *_attention_args(w, c.kwargs.get("attn_mask"), c.kwargs.get("scale")),
            ],
        )

    return Claim("attention backward: flash", emit, prepare=_rows(0, 1, 2, 3, 4))


# -- pooling, sorting, dropout -----------------------------------------------------------------------------


def _full_args(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments by the schema, defaults filled in."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    return [args[k] if k < len(args) else kwargs.get(a.name, a.default_value) for k, a in enumerate(schema)]


def _pool(node: fx.Node) -> Claim | None:
    backward = node.target is aten.max_pool2d_with_indices_backward.default

    def emit(w: Any, c: Call) -> None:
        args = _full_args(node, c.args, c.kwargs)
        tensors = 2 if backward else 1
        kernel, stride, pad, dilation, ceil = args[tensors : tensors + 5]
        pair = [list(x) * (2 // len(x)) if x else [] for x in (kernel, stride, pad, dilation)]
        handles = [w.tensor(t) for t in args[:tensors]]
        rest = [w.tensor(args[7])] if backward else []
        w.call(
            c,
            f"{SHIM}max_pool2d_with_indices{'_backward' if backward else ''}",
            [*handles, *_lists(w, *pair), str(int(ceil)), *rest],
        )

    def strides(lowering: Any, n: fx.Node, args: Sequence[Any]) -> Any:
        from dicp.schedule.strides import dense_strides

        val = n.meta["val"]
        vals = val if isinstance(val, (tuple, list)) else [val]
        x = args[1 if backward else 0]
        d = vals[0].dim()
        order = (0, *range(2, d), 1) if d == 4 and _channels_last(x) else tuple(range(d))
        return [dense_strides(tuple(lowering.index(s) for s in v.shape), order) for v in vals]

    def prepare(lowering: Any, n: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
        count = 2 if backward else 1
        return (*(_in_layout(lowering, n, args, k) for k in range(count)), *args[count:])

    return Claim("max_pool2d", emit, strides=strides, prepare=prepare)


def _dropout(node: fx.Node) -> Claim | None:
    def emit(w: Any, c: Call) -> None:
        x, p, train = _full_args(node, c.args, c.kwargs)
        flag = "nullptr"
        if train is not None:
            w.lines.append(f"int32_t train = {int(train)};")
            flag = "&train"
        w.call(c, SHIM + "native_dropout", [w.tensor(x), repr(float(p)), flag])

    return Claim("native_dropout: eager's generator", emit)


def _sort(node: fx.Node) -> Claim | None:
    stable = node.target is aten.sort.stable

    def emit(w: Any, c: Call) -> None:
        args = _full_args(node, c.args, c.kwargs)
        if not stable:
            x, dim, descending = args
            w.call(c, SHIM + "sort", [w.tensor(x), str(int(dim)), str(int(descending))])
            return
        x, flag, dim, descending = args
        w.lines.append(f"int32_t stable = {int(bool(flag))};")
        w.call(c, SHIM + "sort_stable", [w.tensor(x), "&stable", str(int(dim)), str(int(descending))])

    return Claim("sort", emit)


def _topk(node: fx.Node) -> Claim | None:
    def emit(w: Any, c: Call) -> None:
        x, k, dim, largest, in_order = _full_args(node, c.args, c.kwargs)
        w.call(
            c, SHIM + "topk", [w.tensor(x), w.text(k), str(int(dim)), str(int(largest)), str(int(in_order))]
        )

    return Claim("topk", emit)


def keeps(op: Any) -> bool:
    """Whether some use of the op is claimed."""
    return op in _table()


def supports(target: Any, node: fx.Node) -> bool:
    """Whether a dicp::* op may replace `node` and what feeds it."""
    dtype = _dtype(node)
    if _empty(node):
        return False
    if target is torch.ops.dicp.linear.default:
        return dtype is not None and prefers_onednn(dtype)
    if target is torch.ops.dicp.conv.default:
        return dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available()
    return dtype in FLOATS


@functools.cache
def _table() -> dict[Any, Callable[..., Claim | None]]:
    from dicp.ops.library import register

    register()
    return {
        aten.mm.default: _mm,
        aten.addmm.default: _addmm,
        aten.bmm.default: _bmm,
        aten.baddbmm.default: _baddbmm,
        torch.ops.dicp.linear.default: _linear,
        torch.ops.dicp.conv.default: _conv,
        torch.ops.dicp.attention.default: _attention,
        aten.convolution.default: _convolution,
        aten.convolution_backward.default: _convolution_backward,
        aten._scaled_dot_product_flash_attention_for_cpu.default: _flash,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward,
        aten.max_pool2d_with_indices.default: _pool,
        aten.max_pool2d_with_indices_backward.default: _pool,
        aten.native_dropout.default: _dropout,
        aten.sort.default: _sort,
        aten.sort.stable: _sort,
        aten.topk.default: _topk,
    }

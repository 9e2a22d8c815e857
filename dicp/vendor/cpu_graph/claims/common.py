"""What the claims share: how arguments of a call are written and its operands prepared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from dicp.ir.memory_order import order_of
from dicp.ir.meta_keys import LAYOUT_KEY
from dicp.runtime.cpu import cpu_flags, halves_are_slow, pairs_are_slow
from dicp.schedule.defs import Call, View
from dicp.schedule.strides import dense_strides

aten = torch.ops.aten
LOW = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *LOW)
SHIM = "aoti_torch_cpu_"
ACTIVATIONS = {
    "none": ("none", None),
    "sigmoid": ("sigmoid", None),
    "tanh": ("tanh", None),
    "silu": ("swish", None),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
}
"""What oneDNN does inside its calls as eager does it, by its name and algorithm."""

RECTIFIERS: dict[str, tuple[str, tuple[float, ...]]] = {
    "relu": ("relu", ()),
    "relu6": ("hardtanh", (0.0, 6.0)),
}
"""What it does as well, but for NaN, of which it makes 0: name and scalars. So they are inside only where
nothing can be NaN (rectified.py); else a kernel does them, in place on the library's result."""


_INFINITE = "__builtin_inff()"
LIMITS = {"none": (f"-{_INFINITE}", _INFINITE), "relu": ("0.0f", _INFINITE), "relu6": ("0.0f", "6.0f")}
"""What our templates do by limits that they are given: one function serves all three."""


def activation_of(act: str) -> tuple[str, tuple[str, str]]:
    """The word of a template's Activation (include/dicp_product.h), and its limits."""
    return ("limited", LIMITS[act]) if act in LIMITS else (act, LIMITS["none"])


def onednn_has(dtype: torch.dtype | None) -> bool:
    """Whether the calls of oneDNN that torch exports take this dtype on this processor."""
    if dtype == torch.bfloat16:
        return multiplies(dtype)
    return dtype == torch.float32 and torch.backends.mkldnn.is_available()


@functools.cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether torch's libraries have products of a low precision on this processor that are not slower than
    float32's. Where they have none, ATen multiplies element by element (docs/cpu_graph.md has what that
    takes)."""
    if pairs_are_slow() if dtype == torch.bfloat16 else halves_are_slow():
        return False
    asked = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }[dtype]
    return torch.backends.mkldnn.is_available() and bool(getattr(torch.ops.mkldnn, asked)())


def multiplies_int8() -> bool:
    """Whether the processor has an instruction for sums of products of int8 that ATen's `_int_mm` uses;
    without, it takes 27 times as long as float32's product and both conversions (128 rows, depth 1024, 2816
    columns: 371 ms for 13.7; one core with AVX2, one-off script)."""
    return not cpu_flags().isdisjoint({"avx512_vnni", "amx_int8"})


def whole_lines(n: int) -> int:
    """Floats of whole cache lines that hold n."""
    return -(-n // 16) * 16


def dtype_of(x: Any) -> torch.dtype | None:
    val = x.meta.get("val") if isinstance(x, fx.Node) else None
    return val.dtype if isinstance(val, torch.Tensor) else None


def activation(w: Any, act: str) -> list[str]:
    """Arguments for an activation: name, scalars, their number, algorithm."""
    if act in RECTIFIERS:
        name, scalars = RECTIFIERS[act]
        if not scalars:
            return [f'"{name}"', "nullptr", "0", "nullptr"]
        numbers, pointers = w.fresh("scalars"), w.fresh("pointers")
        w.lines.append(f"const double {numbers}[] = {{{', '.join(map(repr, scalars))}}};")
        w.lines.append(
            f"const double* {pointers}[] = {{{', '.join(f'{numbers} + {k}' for k in range(len(scalars)))}}};"
        )
        return [f'"{name}"', pointers, str(len(scalars)), "nullptr"]
    name, algorithm = ACTIVATIONS[act]
    if algorithm is None:
        return [f'"{name}"', "nullptr", "0", "nullptr"]
    text = w.fresh("algorithm")
    w.lines.append(f'const char* {text} = "{algorithm}";')
    return [f'"{name}"', "nullptr", "0", f"&{text}"]


def rows(*positions: int) -> Callable[..., Sequence[Any]]:
    """Prepare operands whose last dim must be contiguous."""

    def prepare(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
        def fix(a: Any) -> Any:
            view = lowering.operand(a)
            return view if view.strides[-1] == 1 else lowering.operand(a, dense=True)

        return [fix(a) if k in positions and a is not None else a for k, a in enumerate(args)]

    return prepare


def argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def full_args(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """One value per argument of the op's schema, defaults filled in."""
    schema = op._schema.arguments
    return [args[k] if k < len(args) else kwargs.get(a.name, a.default_value) for k, a in enumerate(schema)]


def lists(w: Any, *lists: Sequence[int]) -> list[str]:
    out: list[str] = []
    for values in lists:
        name, n = w.ints(values)
        out += [name, str(n)]
    return out


SPACE = "void* space, int64_t bytes, int64_t threads"
"""The parameters of a template for its workspace, and for how many threads that is."""


def space(w: Any, c: Call) -> list[str]:
    """Their arguments: the workspace is the last of a call's outputs."""
    planned = c.outputs[-1]
    assert planned is not None
    return [w.pointer(planned), str(planned.shape[0]), str(torch.get_num_threads())]


def transposed(v: View) -> View:
    """Matrices with rows and columns exchanged."""
    return View(
        v.buffer,
        (*v.shape[:-2], v.shape[-1], v.shape[-2]),
        (*v.strides[:-2], v.strides[-1], v.strides[-2]),
        v.offset,
    )


def channels_last(v: View) -> bool:
    """Whether dims lie in memory as [batch, *spatial, channels]."""
    return len(v.shape) in (4, 5) and memory_order(v) == _channels_last_order(len(v.shape))


def in_layout(lowering: Any, node: fx.Node, args: Sequence[Any], k: int) -> Any:
    """Operand k stored in the layout that the layout pass chose for it, or the one it was traced with."""
    source = node.args[k]
    if not isinstance(source, fx.Node):
        return args[k]
    if LAYOUT_KEY in source.meta:
        return lowering.in_order(args[k], source.meta[LAYOUT_KEY])
    return lowering.operand(args[k], order=order_of(source.meta["val"]))


def order_in_memory(operand: Any) -> tuple[int, ...] | None:
    """The layout that the pass chose for an operand, or the one it was traced with."""
    if not isinstance(operand, fx.Node):
        return None
    found = operand.meta.get(LAYOUT_KEY)
    return tuple(order_of(operand.meta["val"]) if found is None else found)


def memory_order(v: View) -> tuple[int, ...]:
    """Dims from outermost to innermost. Strides that are not numbers are compared with those of the orders
    that libraries know; row-major otherwise."""
    dims = tuple(range(len(v.shape)))
    if all(isinstance(s, int) for s in v.strides):
        return tuple(sorted(dims, key=lambda d: (-v.strides[d], d)))  # type: ignore[operator]
    last = _channels_last_order(len(dims))
    if len(dims) in (4, 5) and tuple(v.strides) == dense_strides(v.shape, last):
        return last
    seq_first = len(dims) == 4 and v.strides[1] == v.shape[3]
    return (0, 2, 1, 3) if seq_first else dims


def _channels_last_order(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank), 1)

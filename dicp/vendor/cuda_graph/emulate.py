"""The functions of device/ for Triton's interpreter, which knows neither libdevice nor (at any speed)
reductions.

The bodies are those of device/, run as plain Python on the interpreter's tensors; libdevice functions come
from torch, reductions and scans from NumPy. So one emitted kernel serves both, and its logic is tested
without a GPU.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

LIBDEVICE = """
    exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc
    erfinv lgamma rsqrt trunc signbit copysign nextafter hypot atan2 fmod
""".split()
RENAMED = {"rint": "round", "pow": "pow", "round_even": "round"}


@functools.cache
def namespace() -> types.SimpleNamespace:
    """What the name `d` means in an interpreted kernel."""
    from dicp.vendor.cuda_graph import device

    space: dict[str, Any] = {"tl": tl, "libdevice": types.SimpleNamespace(**_libdevice())}
    for name, value in vars(device).items():
        fn = getattr(value, "fn", None)
        if isinstance(fn, types.FunctionType):
            space[name] = types.FunctionType(fn.__code__, space, name, fn.__defaults__)
    space |= {n: f for n, f in _libdevice().items() if n in space and n not in ("fmod",)}
    space |= _rows() | {"widen": widen, "narrow": narrow, "dot": dot, "truth": truth}
    space |= {"unknown": lambda n: n}
    space |= {"exp2_fast": _elementwise("exp2"), "reciprocal_fast": _elementwise("reciprocal")}
    return types.SimpleNamespace(**space)


def _tensor(data: Any, dtype: Any) -> Any:
    data = np.asarray(data)
    return tl.tensor(
        TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)) if data.ndim else dtype
    )


def _like(data: Any, x: Any) -> Any:
    """A tensor of x's shape and dtype around an array."""
    return tl.tensor(TensorHandle(data.reshape(x.handle.data.shape), x.dtype), x.type)


def _elementwise(word: str) -> Callable[..., Any]:
    op = getattr(torch, word)

    def apply(*xs: Any) -> Any:
        if len(xs) == 2:
            xs = tuple(tl.broadcast(*xs))
        out = op(*(torch.from_numpy(np.ascontiguousarray(x.handle.data)) for x in xs)).numpy()
        if out.dtype == np.bool_:
            shape = xs[0].type.shape if xs[0].type.is_block() else []
            kind = tl.block_type(tl.int1, shape) if shape else tl.int1
            return tl.tensor(TensorHandle(out.reshape(xs[0].handle.data.shape), tl.int1), kind)
        return _like(out, xs[0])

    return apply


def _libdevice() -> dict[str, Callable[..., Any]]:
    def fmod(x: Any, y: Any) -> Any:  # torch's vectorised one gives NaN for huge quotients
        x, y = tl.broadcast(x, y)
        return _like(np.fmod(x.handle.data, y.handle.data), x)

    words = {name: name for name in LIBDEVICE} | RENAMED
    return {name: _elementwise(word) for name, word in words.items()} | {"fmod": fmod}


def widen(x: Any) -> Any:
    """Exact; the interpreter's own conversion is not, for numbers that are not normal."""
    data = x.handle.data
    wide = (
        (data.astype(np.uint32) << 16).view(np.float32) if x.dtype == tl.bfloat16 else data.astype(np.float32)
    )
    return tl.tensor(
        TensorHandle(wide, tl.float32),
        tl.block_type(tl.float32, x.type.shape) if x.type.is_block() else tl.float32,
    )


def narrow(x: Any, dtype: Any) -> Any:
    """To the nearest; the interpreter's own conversion truncates."""
    kind = torch.bfloat16 if dtype == tl.bfloat16 else torch.float16
    data = torch.from_numpy(np.ascontiguousarray(x.handle.data)).to(kind)
    bits = data.view(torch.int16).numpy().view(np.uint16 if kind == torch.bfloat16 else np.float16)
    bits = bits.reshape(x.handle.data.shape)
    return tl.tensor(
        TensorHandle(bits, dtype), tl.block_type(dtype, x.type.shape) if x.type.is_block() else dtype
    )


def truth(x: Any) -> Any:
    """A comparison between numbers has their dtype in the interpreter, until it is told."""
    return tl.tensor(TensorHandle(x.handle.data.astype(np.bool_), tl.int1), x.type)


def dot(x: Any, y: Any, acc: Any, precision: str) -> Any:
    """The interpreter's own multiplies the bits of bfloat16."""
    a, b = (v if v.dtype == tl.float32 else widen(v) for v in (x, y))
    return _like(a.handle.data @ b.handle.data + acc.handle.data, acc)


# -- reductions and scans along axis 1 -----------------------------------------------------------------------


def _reduce(fn: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda x: _tensor(fn(x.handle.data, axis=1, keepdims=True).astype(x.handle.data.dtype), x.dtype)


def _scan(fn: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda x: _tensor(fn(x.handle.data, axis=1).astype(x.handle.data.dtype), x.dtype)


def _first_where(hit: Any, position: Any) -> Any:
    live, at = np.broadcast_arrays(hit.handle.data.astype(bool), position.handle.data)
    return _tensor(np.where(live, at, np.iinfo(at.dtype).max).min(axis=1, keepdims=True), position.dtype)


def _scan_position(larger: bool) -> Callable[[Any, Any], Any]:
    def scan(x: Any, position: Any) -> Any:
        data, at = np.broadcast_arrays(x.handle.data, position.handle.data)
        best, where = data.copy(), at.copy()
        for k in range(1, data.shape[1]):
            new, old = data[:, k], best[:, k - 1]
            take = ((new >= old) if larger else (new <= old)) | (new != new)
            best[:, k] = np.where(take, new, old)
            where[:, k] = np.where(take, at[:, k], where[:, k - 1])
        return _tensor(best, x.dtype), _tensor(where, position.dtype)

    return scan


def _cumulative_sum(data: Any, axis: int) -> Any:
    """In float64: as exact as the tree of additions that a GPU makes, or more."""
    return np.cumsum(data, axis=axis, dtype=np.float64 if data.dtype == np.float32 else None)


def _log_cum_sum_exp(data: Any, axis: int) -> Any:
    return torch.logcumsumexp(torch.from_numpy(np.ascontiguousarray(data)), axis).numpy()


def _rows() -> dict[str, Callable[..., Any]]:
    return {
        "row_sum": _reduce(np.sum),
        "row_prod": _reduce(np.prod),
        "row_max": _reduce(np.max),
        "row_min": _reduce(np.min),
        "groups_max": lambda x: _tensor(_groups(x).max(axis=2), x.dtype),
        "groups_sum_exp": _groups_sum_exp,
        "first_where": _first_where,
        "scan_sum": _scan(_cumulative_sum),
        "scan_prod": _scan(np.cumprod),
        "scan_max": _scan(np.maximum.accumulate),
        "scan_min": _scan(np.minimum.accumulate),
        "scan_logsumexp": _scan(_log_cum_sum_exp),
        "scan_argmax": _scan_position(True),
        "scan_argmin": _scan_position(False),
        "row_last": lambda x, column, last: _last(x, column, last),
    }


def _groups(x: Any) -> Any:
    return x.handle.data.reshape(x.handle.data.shape[0], -1, 8)


def _groups_sum_exp(x: Any, base: Any, short: bool) -> Any:
    away = _groups(x) - base.handle.data[:, :, None]
    return _tensor(np.exp(away).sum(axis=2), x.dtype)


def _last(x: Any, column: Any, last: int) -> Any:
    data, where = np.broadcast_arrays(x.handle.data, column.handle.data == last)
    return _tensor(data[where].reshape(data.shape[0], 1), x.dtype)


__all__ = ["namespace"]

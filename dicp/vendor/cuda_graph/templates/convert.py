"""Conversions to and from eight-bit floats, which the kernel IR does not compute with.

Bits are worked out with integers: as eager does it, overflow included (Triton's own saturates), and on
every GPU, also those without instructions for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import real_tensors
from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.index import Index
from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim
from dicp.vendor.cuda_graph.expression import TYPES, host_text
from dicp.vendor.cuda_graph.templates import Launched, Operand, claim, make, number

FLOAT8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 1024


def conversion(node: fx.Node) -> Claim | None:
    """The claim of a conversion between an eight-bit float and another one; None for any other."""
    if not isinstance(node.args[0], fx.Node) or set(node.kwargs) - {"dtype"}:
        return None
    source, target = node.args[0].meta["val"].dtype, node.meta["val"].dtype
    if (source in FLOAT8) == (target in FLOAT8) or not {source, target} <= {*FLOAT8, *FLOATS}:
        return None
    return claim(f"convert: Triton {source} to {target}".replace("torch.", ""), _kernels)


def _kernels(c: Call) -> Sequence[Launched]:
    x, y = c.args[0], c.outputs[0]
    out = View(y, y.shape, y.strides)
    source, target = Operand("x", x, x.strides), Operand("out", out, out.strides)
    total = ix.product(y.shape)
    names = [f"i{k}" for k in range(len(y.shape))]
    body = ["i = tl.program_id(0).to(INDEX) * X + tl.arange(0, X)", f"live = i < {host_text(total)}"]
    body += _apart(names, y.shape)
    body += [
        f"value = tl.load({source.at(*names)} + i * 0, mask=live, other=0)",
        f"tl.store({target.at(*names)} + i * 0, {_converted(x.buffer.dtype, y.dtype)}, mask=live)",
    ]
    params: list[tuple[str, Any, bool, Index]] = [
        ("x", x.buffer.dtype, False, x.span),
        ("out", y.dtype, True, out.span),
    ]
    extents = [total, *x.strides, *y.strides, *y.shape]
    grid = f"(({host_text(total)}) + {BLOCK - 1}) // {BLOCK}"
    about = [f"{x.buffer.dtype} to {y.dtype}".replace("torch.", "")]
    origins = (c.note,) if c.note else ()
    return [Launched(make("convert", about, params, extents, {"X": BLOCK}, body, grid, origins, 4), (x, out))]


def _apart(names: Sequence[str], shape: Sequence[Index]) -> list[str]:
    """Each axis' position, from the position in all of them."""
    out, inner = [], 1
    for name, n in reversed(list(zip(names, shape, strict=True))):
        out.append(
            f"{name} = i // {number(inner)} % {number(n)}" if inner != 1 else f"{name} = i % {number(n)}"
        )
        inner = ix.product((inner, n))  # type: ignore[assignment]
    return out[::-1]


def _converted(source: torch.dtype, target: torch.dtype) -> str:
    if source in FLOAT8:
        wide = f"d.from_{FLOAT8[source]}(value)"
        return f"d.narrow({wide}, {TYPES[target]})" if target in ex.LOW_PRECISION else wide
    over = f", {_largest()}" if target == torch.float8_e4m3fn else ""
    return f"d.to_{FLOAT8[target]}({'d.widen(value)' if source in ex.LOW_PRECISION else 'value'}{over})"


@functools.cache
def _largest() -> int:
    """The byte that this torch makes of a number too large: the largest one, in earlier versions NaN."""
    with real_tensors():
        return int(torch.tensor([1e6]).to(torch.float8_e4m3fn).view(torch.uint8))


__all__ = ["FLOAT8", "conversion"]

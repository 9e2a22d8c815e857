"""Matrix products: which library serves one, and its call."""

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
from dicp.vendor.cpu_graph.claims.common import FLOATS, SHIM, activation, argument, dense, dtype_of


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


def _transposed(v: View) -> View:
    return View(
        v.buffer,
        (*v.shape[:-2], v.shape[-1], v.shape[-2]),
        (*v.strides[:-2], v.strides[-1], v.strides[-2]),
        v.offset,
    )


def mm(node: fx.Node, config: Any) -> Claim | None:
    if dtype_of(node) not in (*FLOATS, torch.float64):
        return None
    if config.numerics != "eager" and prefers_onednn(dtype_of(node)) and not _for_blas(node):  # type: ignore[arg-type]
        return Claim(
            "mm: oneDNN",
            lambda w, c: _linear_call(w, c, c.args[0], _transposed(c.args[1]), None, None, "none"),
            prepare=_operands(weight=1),
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


def addmm(node: fx.Node, config: Any) -> Claim | None:
    if dtype_of(node) not in (*FLOATS, torch.float64):
        return None
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
    bias = node.args[0].meta["val"]  # type: ignore[union-attr]
    columns = node.meta["val"].shape[-1]
    plain = bias.dim() == 1 and known_equal(bias.shape[0], columns) and beta == 1 and alpha == 1
    if config.numerics != "eager" and plain and prefers_onednn(dtype_of(node)) and not _for_blas(node):  # type: ignore[arg-type]
        return Claim(
            "addmm: oneDNN",
            lambda w, c: _linear_call(w, c, c.args[1], _transposed(c.args[2]), c.args[0], None, "none"),
            prepare=_operands(0, weight=2),
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


def bmm(node: fx.Node, config: Any) -> Claim | None:
    if dtype_of(node) not in (*FLOATS, torch.float64):
        return None
    return Claim(
        "bmm: BLAS",
        lambda w, c: w.call(
            c, SHIM + "bmm_out", [w.output(c.outputs[0]), w.tensor(c.args[0]), w.tensor(c.args[1])]
        ),
        out=True,
    )


def baddbmm(node: fx.Node, config: Any) -> Claim | None:
    if dtype_of(node) not in (*FLOATS, torch.float64):
        return None
    beta, alpha = (repr(float(node.kwargs.get(k, 1))) for k in ("beta", "alpha"))  # type: ignore[arg-type]
    return Claim(
        "baddbmm: BLAS",
        lambda w, c: w.call(
            c, SHIM + "baddbmm_out", [w.output(c.outputs[0]), *(w.tensor(a) for a in c.args[:3]), beta, alpha]
        ),
        out=True,
    )


def _operands(*positions: int, weight: int) -> Callable[..., Sequence[Any]]:
    """Dense operands at `positions`, and a weight of which one dim is: oneDNN refuses the strides of some
    others (rows that overlap with those before), and copies all."""
    as_dense = dense(*positions)

    def prepare(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
        args = list(as_dense(lowering, node, args))
        view = lowering.operand(args[weight])
        args[weight] = view if _nests(view) else lowering.operand(args[weight], dense=True)
        return args

    return prepare


def _nests(v: View) -> bool:
    """Whether a matrix is rows, or columns, one behind the other, as far as strides are numbers."""
    for inner, outer in ((-1, -2), (-2, -1)):
        if v.strides[inner] == 1 or v.shape[inner] == 1:
            step, length = v.strides[outer], v.shape[inner]
            known = isinstance(step, int) and isinstance(length, int)
            if v.shape[outer] == 1 or not known or step >= length:  # type: ignore[operator]
                return True
    return False


def linear(node: fx.Node, config: Any) -> Claim | None:
    x, weight, bias, other = (*node.args, None, None, None, None)[:4]
    act = argument(node, 4, "act", "none")
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
        prepare=_operands(2, 3, weight=1),
    )


def _linear_call(
    w: Any, c: Call, x: View, weight: View, bias: View | None, other: View | None, act: str
) -> None:
    if other is not None:
        args = [w.tensor(x), w.tensor(other), w.tensor(weight), w.optional(bias), '"add"']
        w.call(c, SHIM + "_linear_pointwise_binary", args)
        return
    w.call(
        c, SHIM + "_linear_pointwise", [w.tensor(x), w.tensor(weight), w.optional(bias), *activation(w, act)]
    )

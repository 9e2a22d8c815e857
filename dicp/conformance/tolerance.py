"""The accuracy rule: no further from the fp64 reference than twice eager, plus one ulp-scaled term per dtype.

For every element i of a floating-point result, with a = compiled, e = eager, r = the same call in fp64:

    |a_i - r_i|  <=  2 * E_i  +  ULPS[dtype] * eps[dtype] * S_i  +  2 * smallest_subnormal[dtype]

* An *elementwise* operator is judged element by element: S_i = |r_i|, and E_i = max(|e_i - r_i|, w * |r_i|),
  w being eager's own worst relative error in that tensor, at most 64 eps (so that one element where eager got
  lucky is no yardstick).
* An *accumulating* operator (everything else, and every gradient) is judged normwise, as numerical analysis
  does, since the order of a sum is nobody's promise: S = max |r|, E = max |e - r|.
* Where that fails, the problem's conditioning is asked: the reference is run again on inputs moved by one
  eps, relatively. A result that moves by d when each input moves by one ulp cannot be demanded to be nearer
  than d. A response so big that it is a jump and not a slope (a rounding boundary, a changed argmax) is not
  accepted.
* NaN and infinities: each element is of the same class (NaN, +inf, -inf, finite) as eager's, or as the
  reference rounded to the dtype (a compiler that keeps fp32 inside may rightly stay finite where eager's bf16
  step overflowed).
* Integers and booleans: equal to eager, or to the exact reference. No percentage of wrong elements is free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch

# In units of eps: fp64 stands for its own reference, so its term must cover eager's error as well as ours.
ULPS: dict[torch.dtype, float] = {
    torch.float64: 16.0,
    torch.complex128: 16.0,
    torch.float32: 4.0,
    torch.complex64: 4.0,
    torch.bfloat16: 1.0,
    torch.float16: 1.0,
    torch.complex32: 2.0,
}

Wobble = Callable[[], torch.Tensor | None]
WORST_EAGER = 64.0  # eps: the cap on w
ALIKE = 0.02  # of the largest element: how far two wrong results may lie apart and count as one
STEEPEST = 16.0  # eps: an elementwise response above this is a jump


def is_inexact(dtype: torch.dtype) -> bool:
    """Floating point or complex."""
    return dtype.is_floating_point or dtype.is_complex


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the reference.   bf16 -> f64, c64 -> c128, i32 -> i32"""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal everywhere, NaN equal to NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not is_inexact(a.dtype):
        return bool(torch.equal(a, b))
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _classes(x: torch.Tensor) -> torch.Tensor:
    """0 finite, 1 NaN, 2 +inf, 3 -inf; a complex number is finite or not."""
    if x.dtype.is_complex:
        return (~torch.isfinite(x)).to(torch.int8)
    zero = torch.zeros(x.shape, dtype=torch.int8, device=x.device)
    return zero.masked_fill(torch.isnan(x), 1).masked_fill(x == math.inf, 2).masked_fill(x == -math.inf, 3)


def _first(bad: torch.Tensor, actual: torch.Tensor, eager: torch.Tensor, ref: torch.Tensor | None) -> str:
    where = tuple(bad.nonzero()[0].tolist())
    text = (
        f"{int(bad.sum())} of {bad.numel()} elements differ; at {where}: compiled {actual[where].item()!r}, "
        f"eager {eager[where].item()!r}"
    )
    return text if ref is None else text + f", reference {ref[where].item()!r}"


def _finite_max(x: torch.Tensor) -> float:
    finite = x[torch.isfinite(x)]
    return float(finite.max()) if finite.numel() else 0.0


def alike(a: Sequence[torch.Tensor | None], b: Sequence[torch.Tensor | None]) -> bool:
    """Whether two implementations that are both wrong give the same, but for what rounding may do."""
    return all(
        x is y
        or x is not None
        and y is not None
        and (x.shape, x.dtype) == (y.shape, y.dtype)
        and _near(x.detach().to(wide(x.dtype)), y.detach().to(wide(y.dtype)))
        for x, y in zip(a, b, strict=True)
    )


def _near(x: torch.Tensor, y: torch.Tensor) -> bool:
    if not is_inexact(x.dtype):
        return bool(torch.equal(x, y))
    return torch.allclose(x, y, rtol=0, atol=ALIKE * _finite_max(y.abs()), equal_nan=True)


def judge(
    actual: torch.Tensor,
    eager: torch.Tensor,
    reference: torch.Tensor | None,
    kind: Literal["elementwise", "accumulating"],
    wobble: Wobble | None = None,
    inputs_scale: float = 0.0,
) -> str | None:
    """Why `actual` is not accurate enough, or None.

    reference: the fp64 (exact integer) result, None where there is none: then eager stands for it.
    wobble: the largest response of the reference, per element, to inputs moved by one eps; called only when
    needed. inputs_scale: the largest finite magnitude among the inputs.
    """
    if actual.numel() == 0 or same_bits(actual, eager):
        return None
    if reference is not None and reference.shape != actual.shape:
        reference = None
    dtype = actual.dtype
    if not is_inexact(dtype):
        bad = actual != eager
        if reference is not None and not is_inexact(reference.dtype):
            bad &= actual != reference
        return _first(bad, actual, eager, reference) if bool(bad.any()) else None
    ref = (eager if reference is None else reference).to(wide(dtype))
    bad = (_classes(actual) != _classes(eager)) & (_classes(actual) != _classes(ref.to(dtype)))
    if bool(bad.any()):
        return "not the same NaN/inf class: " + _first(bad, actual, eager, ref)
    a, e = actual.to(wide(dtype)), eager.to(wide(dtype))
    # Where the reference overflows or is NaN but compiled and eager agree to be finite, eager is all there is
    # to compare to.
    ref = torch.where(torch.isfinite(ref), ref, e)
    live = torch.isfinite(a) & torch.isfinite(ref)
    if not bool(live.any()):
        return None
    a, ref, e = (torch.where(live, x, torch.zeros_like(x)) for x in (a, ref, e))
    distance, scale, theirs = (a - ref).abs(), ref.abs(), (e - ref).abs()
    theirs = torch.where(torch.isfinite(theirs), theirs, torch.zeros_like(theirs))
    eps = torch.finfo(dtype).eps
    floor = 2 * torch.finfo(dtype).smallest_normal * eps
    if kind == "elementwise":
        normal = scale > torch.finfo(dtype).smallest_normal
        worst = min(_finite_max(theirs[normal] / scale[normal]), WORST_EAGER * eps)
        bound = 2 * torch.maximum(theirs, worst * scale) + ULPS[dtype] * eps * scale + floor
    else:
        size = _finite_max(scale)
        bound = torch.full_like(distance, 2 * _finite_max(theirs) + ULPS[dtype] * eps * size + floor)
    bad = distance > bound
    if bool(bad.any()) and wobble is not None:
        bad = distance > bound + _slope(wobble, kind, dtype, max(_finite_max(scale), inputs_scale), bound)
    if not bool(bad.any()):
        return None
    ratio = float((distance[bad] / bound[bad]).max())
    return _first(bad, actual, eager, reference) + f"; {ratio:.3g} times the bound"


def _slope(wobble: Wobble, kind: str, dtype: torch.dtype, size: float, like: torch.Tensor) -> torch.Tensor:
    response = wobble()
    nothing = torch.zeros_like(like)
    eps = torch.finfo(dtype).eps
    if response is None or response.shape != like.shape:
        return nothing
    if kind == "elementwise":
        # Half precision computes in fp32 inside a kernel: no conditioning to excuse.
        if eps > 1e-5:
            return nothing
        limit = STEEPEST * eps * size
    else:
        limit = max(math.sqrt(eps), STEEPEST * eps) * size if eps < 1e-5 else STEEPEST * eps * size
        response = torch.full_like(response, _finite_max(response))
    return torch.where(torch.isfinite(response) & (response <= limit), response, nothing)

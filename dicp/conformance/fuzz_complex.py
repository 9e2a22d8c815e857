"""The fuzzer's rules of complex numbers. Conjugates and negated views are lazy in torch: each is a chance to
read memory that does not hold what the elements are."""

from __future__ import annotations

import random

import torch

from .fuzz_ops import Answer, Rule, broadcast, dim_of, is_float, one_of


def is_complex(t: torch.Tensor) -> bool:
    """Complex, of a precision that CPUs compute in."""
    return t.dtype in (torch.complex64, torch.complex128)


def _full(t: torch.Tensor) -> bool:
    return t.dtype in (torch.float32, torch.float64)


# ---- from and to real numbers ----


def _made(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x = t[0]
    if not _full(x):
        return "{0}.to(torch.complex64)"
    texts = [
        "{0}.to(torch.complex64)",
        "torch.complex({0}, {0} * 0.5)",
        "{0} * (1 - 2j)",
        "torch.polar({0}.abs() + 0.5, {0})",
        "torch.view_as_complex(torch.stack([{0}, 1 - {0}], -1))",
    ]
    if x.dim() and x.numel():
        d = dim_of(rng, x)
        texts += [f"torch.fft.fft({{0}}, dim={d})", f"torch.fft.rfft({{0}}, dim={d})"]
    if x.dim() and x.shape[-1] == 2 and x.numel():
        texts += ["torch.view_as_complex({0}.contiguous())"] * 3
    return rng.choice(texts)


def _made_of_two(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    a, b = t
    if not _full(a) or a.dtype != b.dtype or not broadcast(a, b):
        return None
    return one_of(rng, "torch.complex({0}, {1})", "{0} + {1} * 1j", "torch.polar({0}.abs() + 0.5, {1})")


def _parts(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    if not is_complex(t[0]):
        return None
    return one_of(
        rng,
        "{0}.real",
        "{0}.imag",
        "{0}.conj().imag",
        "{0}.conj().real",
        "-{0}.imag",
        "torch.view_as_real({0})",
        "torch.view_as_real({0}.resolve_conj())",
        "torch.view_as_real({0}.conj().resolve_conj())",
    )


# ---- elementwise ----


def _unary_exact(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x = t[0]
    if not is_complex(x):
        return None
    texts = [
        "{0}.conj()",
        "{0}.conj()",
        "{0}.conj().clone()",
        "{0}.resolve_conj()",
        "torch.conj_physical({0})",
        "-{0}",
        "{0} * 1j",
        "{0}.contiguous()",
        "{0}.conj().contiguous()",
        "{0}.resolve_neg()",
    ]
    if x.dim() > 1:
        texts += ["{0}.mH", "{0}.adjoint().clone()", "{0}.conj().flatten()", "{0}.mH.reshape(-1)"]
    return rng.choice(texts)


def _unary(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    if not is_complex(t[0]):
        return None
    return one_of(
        rng,
        "torch.sin({0} * 0.25)",
        "torch.cos({0}.conj())",
        "torch.exp({0} * 0.25)",
        "torch.tanh({0} * 0.125)",
        "{0} * (0.5 - 0.25j)",
        "{0} / (2 - 1j)",
        "(1 + 1j) / ({0}.abs() + 1)",
        "{0} ** 2",
        "torch.abs({0})",
        "{0} * {0}.conj()",
        "torch.reciprocal({0} * {0}.conj() + 1)",
        "{0} - 0.3",
        "2j - {0}",
        "torch.square({0}).real",
        "{0}.to(torch.complex128)",
        "{0}.to(torch.complex64)",
    )


def _binary(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    a, b = t
    if not (is_complex(a) and (is_complex(b) or is_float(b))) or not broadcast(a, b):
        return None
    texts = [
        "{0} + {1}",
        "{0} - {1}",
        "{1} - {0}",
        "{0} * {1}",
        "{0}.conj() * {1}",
        "{0} / ({1}.abs() + 1)",
        "torch.add({0}, {1}, alpha=0.5)",
        "torch.where({1} == {1}, {0}, {1})",
    ]
    if is_complex(b):
        texts += ["{0} * {1}.conj()", "{0} + {1}.conj()", "torch.add({0}, {1}, alpha=1j)"]
    if a.dtype == b.dtype:
        texts += ["torch.addcmul({0}, {0}, {1}, value=0.5)", "torch.lerp({0}, {1}, 0.25)"]
    return rng.choice(texts)


def _jump(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    if not is_complex(t[0]):
        return None
    return one_of(
        rng,
        "torch.sgn({0})",
        "torch.angle({0})",
        "torch.sqrt({0})",
        "torch.log({0} + 0.1)",
        "{0} == {0}.conj()",
        "{0} != 0",
        "torch.isnan({0})",
        "torch.isreal({0})",
        "{0}.to(torch.bool)",
    )


# ---- reductions, transforms, products ----


def _reduce(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x = t[0]
    if not is_complex(x) or x.numel() == 0:
        return None
    if x.dim() == 0 or rng.random() < 0.2:
        return one_of(rng, "{0}.sum()", "{0}.conj().mean()", "torch.linalg.vector_norm({0} + 2)")
    d, keep = dim_of(rng, x), rng.choice(("True", "False"))
    texts = [
        f"{{0}}.sum({d}, keepdim={keep})",
        f"{{0}}.conj().sum({d})",
        f"{{0}}.mean({d}, keepdim={keep})",
        f"torch.cumsum({{0}}, {d})",
        f"torch.cumsum({{0}}.conj(), {d})",
        f"{{0}}.var({d}, correction=0)",
        f"torch.linalg.vector_norm({{0}} + 2, dim={d})",
        f"{{0}} - {{0}}.mean({d}, keepdim=True)",
        f"torch.count_nonzero({{0}} * 0, {d})",
    ]
    if x.shape[d] < 6:
        texts += [f"torch.prod({{0}} * 0.5, {d})", f"torch.cumprod({{0}} * 0.5, {d})"]
    return rng.choice(texts)


def _transform(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x = t[0]
    if not is_complex(x) or x.dim() == 0 or x.numel() == 0:
        return None
    d = dim_of(rng, x)
    texts = [
        f"torch.fft.fft({{0}}, dim={d})",
        f"torch.fft.ifft({{0}}.conj(), dim={d})",
        f"torch.fft.ifft({{0}}, dim={d}, norm='ortho')",
        f"torch.fft.fftshift({{0}}, dim={d})",
    ]
    if x.shape[d] > 1:
        texts += [f"torch.fft.irfft({{0}}, dim={d})", f"torch.fft.hfft({{0}}, dim={d})"]
    if x.dim() > 1:
        texts += ["torch.fft.fft2({0})", "torch.fft.ifftn({0})"]
    return rng.choice(texts)


def _matmul(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    a, b = t
    if not is_complex(a) or a.dtype != b.dtype or not a.dim() or not b.dim() or 0 in (*a.shape, *b.shape):
        return None
    if a.shape[-1] == b.shape[-2 if b.dim() > 1 else -1]:
        return one_of(rng, "{0} @ {1}", "{0} @ {1}.conj()", "{0}.conj() @ {1}")
    if b.dim() > 1 and a.shape[-1] == b.shape[-1]:
        return one_of(rng, "{0} @ {1}.mH", "{0} @ {1}.mT", "{0}.conj() @ {1}.mH")
    return None


# ---- writes ----


def _write(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x = t[0]
    if not is_complex(x):
        return None
    texts = [
        "{0}.mul_(0.5)",
        "{0}.mul_(1j)",
        "{0}.add_(1 - 2j)",
        "{0}.neg_()",
        "{0}.conj_physical_()",
        "{0}.imag.mul_(2)",
        "{0}.real.zero_()",
        "{0}.conj().mul_(1 + 1j)",
        "{0}.conj().imag.add_(1)",
        "torch.view_as_real({0}).sub_(1)",
        "{0}.zero_()",
    ]
    if x.dim():
        texts += ["{0}[..., 0] = 1 - 2j", "{0}.conj()[..., :1].fill_(2j)", "{0}[..., 1:].imag.sub_(1)"]
    return rng.choice(texts)


def _write_from(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x, y = t
    if not is_complex(x) or not (is_complex(y) or is_float(y)) or not broadcast(x, y):
        return None
    if torch.broadcast_shapes(x.shape, y.shape) != x.shape:
        return None
    texts = ["{0}.copy_({1})", "{0}.add_({1})", "{0}.conj().copy_({1})", "{0}.conj().sub_({1})"]
    texts += ["{0}.copy_({1}.conj())", "{0}.imag.copy_({1}.real)" if is_complex(y) else "{0}.imag.copy_({1})"]
    return rng.choice(texts)


RULES: tuple[Rule, ...] = (
    Rule("complex_made", 1, _made, weight=0.7),
    Rule("complex_made_of_two", 2, _made_of_two, weight=0.7),
    Rule("complex_parts", 1, _parts, exact=True, weight=3),
    Rule("complex_unary_exact", 1, _unary_exact, exact=True, weight=3),
    Rule("complex_unary", 1, _unary, weight=3),
    Rule("complex_binary", 2, _binary, weight=3),
    Rule("complex_jump", 1, _jump, exact=True, exact_in=True),
    Rule("complex_reduce", 1, _reduce, weight=2),
    Rule("complex_transform", 1, _transform, weight=1.5),
    Rule("complex_matmul", 2, _matmul, weight=2),
    Rule("complex_write", 1, _write, inplace=True, weight=2),
    Rule("complex_write_from", 2, _write_from, inplace=True, weight=2),
)

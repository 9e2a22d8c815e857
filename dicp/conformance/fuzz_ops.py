"""What the fuzzer writes: rules of statements over tensors, each with conditions on its operands.

A rule is given operands and a random generator and answers with a template (`torch.add({0}, {1})`) or None
where it does not apply. Sizes are spelled through operands (`{0}.shape[0]`), so that a program means
something for other sizes as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .fuzz_texts import (
    BINARY,
    BINARY_EXACT,
    BINARY_JUMPS,
    BOOL_UNARY,
    CASTS,
    INT_BINARY,
    INT_UNARY,
    JUMPS,
    SMOOTH,
    UNARY_EXACT,
)
from .tolerance import is_inexact

Answer = str | None


@dataclass(frozen=True)
class Rule:
    """A family of statements.

    operands: how many tensors; make: (rng, operands) -> template; exact_in: wants operands that every
    implementation computes to the last bit (a rounding boundary is no bug); exact: exact operands give an
    exact result; inplace: the statement writes to operand 0 and has no result; weight: how often.
    """

    name: str
    operands: int
    make: Callable[[random.Random, list[torch.Tensor]], Answer]
    exact: bool = False
    exact_in: bool = False
    inplace: bool = False
    weight: float = 1.0


def is_float(t: torch.Tensor) -> bool:
    """Floating point."""
    return t.dtype.is_floating_point


def is_int(t: torch.Tensor) -> bool:
    """An integer, not a boolean."""
    return not is_inexact(t.dtype) and t.dtype != torch.bool


def is_index(t: torch.Tensor) -> bool:
    """Usable as an index once brought into range."""
    return t.dtype in (torch.int64, torch.int32)


def broadcast(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the shapes broadcast."""
    return all(x == y or 1 in (x, y) for x, y in zip(reversed(a.shape), reversed(b.shape), strict=False))


def one_of(rng: random.Random, *texts: str) -> str:
    """One of the texts."""
    return rng.choice(texts)


def dim_of(rng: random.Random, t: torch.Tensor) -> int:
    """A dimension of a tensor that has some, sometimes counted from the end."""
    d = rng.randrange(t.dim())
    return d - t.dim() if rng.random() < 0.4 else d


# ---- elementwise ----


def _unary(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    return rng.choice(SMOOTH) if is_float(t[0]) else None


def _unary_exact(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    return rng.choice(UNARY_EXACT) if is_float(t[0]) else None


def _jump(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    return rng.choice(JUMPS) if is_float(t[0]) else None


def _int_unary(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    return (
        rng.choice(BOOL_UNARY)
        if t[0].dtype == torch.bool
        else rng.choice(INT_UNARY)
        if is_int(t[0])
        else None
    )


def _binary(texts: tuple[str, ...], both: Callable[[torch.Tensor], bool]) -> Callable[..., Answer]:
    def make(rng: random.Random, t: list[torch.Tensor]) -> Answer:
        return rng.choice(texts) if both(t[0]) and both(t[1]) and broadcast(t[0], t[1]) else None

    return make


def _bool_binary(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    if t[0].dtype == t[1].dtype == torch.bool and broadcast(t[0], t[1]):
        return one_of(
            rng, "{0} & {1}", "{0} | {1}", "{0} ^ {1}", "torch.logical_and({0}, {1})", "{0} != {1}"
        )
    return None


def _masked(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    if t[0].dtype == torch.bool and is_float(t[1]) and broadcast(t[0], t[1]):
        return one_of(
            rng,
            "torch.where({0}, {1}, 0.5)",
            "{1}.masked_fill({0}, -1.5)"
            if t[0].dim() <= t[1].dim() and torch.broadcast_shapes(t[0].shape, t[1].shape) == t[1].shape
            else "torch.where({0}, {1}, 0)",
            "torch.where({0}, {1}, -{1})",
            "{1} * {0}",
        )
    return None


def _cast(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    return f"{{0}}.to({rng.choice(CASTS)})" if is_float(t[0]) else None


# ---- reductions and scans ----


def _reduce(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x = t[0]
    if not is_float(x) or x.numel() == 0:
        return None
    if x.dim() == 0 or rng.random() < 0.15:
        return one_of(
            rng,
            "{0}.sum()",
            "{0}.mean()",
            "{0}.amax()",
            "{0}.var(correction=0)",
            "torch.linalg.vector_norm({0} + 2)",
        )
    d, keep = dim_of(rng, x), rng.choice(("True", "False"))
    dims = f"{d}" if x.dim() < 2 or rng.random() < 0.7 else "(0, -1)"
    return one_of(
        rng,
        f"{{0}}.sum({dims}, keepdim={keep})",
        f"{{0}}.mean({dims}, keepdim={keep})",
        f"{{0}}.amax({dims}, keepdim={keep})",
        f"{{0}}.amin({dims}, keepdim={keep})",
        f"torch.softmax({{0}}, {d})",
        f"torch.log_softmax({{0}}, {d})",
        f"torch.logsumexp({{0}}, {d}, keepdim={keep})",
        f"torch.cumsum({{0}}, {d})",
        f"{{0}}.var({d}, correction=0, keepdim={keep})",
        f"torch.std({{0}} + 1, {d}, correction=0, keepdim={keep}) + 0"
        if x.shape[d] > 2
        else f"{{0}}.sum({d})",
        "F.layer_norm({0}, {0}.shape[-1:])",
        f"({{0}} - {{0}}.mean({d}, keepdim=True))",
        f"{{0}}.sum({d}, dtype=torch.float32)",
        f"torch.prod({{0}}.clamp(0.5, 1.5), {d})" if x.shape[d] < 20 else f"{{0}}.sum({d})",
        f"F.normalize({{0}} + 0.1, dim={d})",
        f"torch.cumprod({{0}}.clamp(0.5, 1.4), {d})" if x.shape[d] < 20 else f"{{0}}.sum({d})",
        f"torch.linalg.vector_norm({{0}}.abs() + 1, dim={d})",
        "F.rms_norm({0}, {0}.shape[-1:])",
        f"torch.nansum({{0}}, {d})",
    )


def _reduce_exact(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x = t[0]
    if x.dim() == 0 or x.numel() == 0:
        return None
    d, keep = dim_of(rng, x), rng.choice(("True", "False"))
    if x.dtype == torch.bool:
        return one_of(
            rng,
            f"{{0}}.any({d}, keepdim={keep})",
            f"{{0}}.all({d})",
            "{0}.all()",
            "{0}.any()",
            f"{{0}}.sum({d})",
            f"torch.cumsum({{0}}, {d})",
        )
    if is_int(x):
        narrow = rng.choice(("torch.int8", "torch.uint8", "torch.int16"))
        return one_of(
            rng,
            f"{{0}}.sum({d}, keepdim={keep})",
            "{0}.sum()",
            f"{{0}}.sum({d}, dtype={narrow})",
            f"torch.cumsum({{0}}, {d}, dtype={narrow})",
            f"({{0}} + 2).prod({d}, dtype={narrow})",
            f"{{0}}.amax({d})",
            f"torch.cumsum({{0}}, {d})",
            f"({{0}} % 3).prod({d})",
            f"torch.cummax({{0}}, {d})[0]",
            f"torch.argmin({{0}}, {d})",
        )
    return one_of(
        rng,
        f"torch.argmax({{0}}, {d}, keepdim={keep})",
        f"torch.argmin({{0}}, {d})",
        f"torch.count_nonzero({{0}}, {d})",
        f"torch.cummax({{0}}, {d})[0]",
        f"torch.sort({{0}}, {d})[0]",
        f"{{0}}.max({d})[0]",
        f"{{0}}.any({d})",
        f"torch.argsort({{0}}, {d}, stable=True)",
        # of elements that share a place eager's median is whatever memory held
        f"torch.median({{0}}.contiguous(), {d})[0]" if x.shape[d] % 2 else f"{{0}}.amin({d})",
        "torch.aminmax({0})[1]",
    )


# ---- views and joins ----


def _view(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x = t[0]
    if x.dim() == 0:
        return one_of(rng, "{0}.unsqueeze(0)", "{0}.reshape(1, 1)", "{0}.expand(3)", "{0}.view(1)")
    d, e = dim_of(rng, x), dim_of(rng, x)
    texts = [
        f"{{0}}.transpose({d}, {e})",
        "{0}.reshape(-1)",
        f"{{0}}.unsqueeze({d})",
        f"{{0}}.flip({d})",
        f"torch.roll({{0}}, 1, {d})",
        f"{{0}}.movedim({d}, {e})",
        f"{{0}}.unsqueeze({d}).squeeze({d})",
    ]
    if x.dim() > 1:
        texts += [
            "{0}.flatten(0, 1)",
            "{0}.flatten()",
            "{0}.mT",
            "{0}.reshape({0}.shape[-1], -1)" if x.numel() else "{0}.mT",
            f"{{0}}.select({d}, 0)" if x.shape[d] else "{0}.mT",
            "{0}.diagonal()",
        ]
    if x.shape[d] > 2:
        at = ", ".join([":"] * (d % x.dim()))
        at = at + ", " if at else ""
        texts += [
            f"{{0}}[{at}1:]",
            f"{{0}}[{at}::2]",
            f"{{0}}[{at}1:-1]",
            f"{{0}}.narrow({d}, 1, 2)",
            f"{{0}}.chunk(2, {d})[0]",
            f"{{0}}.chunk(2, {d})[1]",
            f"{{0}}.split(2, {d})[-1]",
            f"{{0}}.unfold({d}, 2, 1)",
            f"{{0}}[{at}-2]",
            f"{{0}}.tensor_split(2, {d})[1]",
        ]
    if x.shape[d] == 1:
        texts += [
            f"{{0}}.squeeze({d})",
            f"{{0}}.expand({', '.join('4' if i == d % x.dim() else '-1' for i in range(x.dim()))})",
        ]
    if x.shape[d] and x.shape[d] % 2 == 0:
        texts += [f"{{0}}.unflatten({d}, (2, -1))", f"{{0}}.unflatten({d}, (-1, 2))"]
    return rng.choice(texts)


def _data_movement(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x = t[0]
    if x.dim() == 0:
        return "{0}.repeat(3)"
    d = dim_of(rng, x)
    texts = [
        f"torch.cat([{{0}}, {{0}}], {d})",
        f"torch.stack([{{0}}, {{0}}], {d})",
        f"{{0}}.repeat_interleave(2, {d})",
        "F.pad({0}, (1, 2))",
        "F.pad({0}, (0, 1), value=1)",
        f"torch.cat([{{0}}.narrow({d}, 0, 1), {{0}}], {d})",
    ]
    if x.dim() > 1:
        texts += ["torch.tril({0})", "torch.triu({0}, 1)", "F.pad({0}, (1, 0, 0, 2))"]
    if x.dim() in (2, 3) and x.shape[-1] > 2 and is_float(x):
        texts += ["F.pad({0}, (1, 2), mode='reflect')", "F.pad({0}, (2, 1), mode='replicate')"]
    if x.shape[-1] > 2:
        texts += ["F.pad({0}, (-1, 1))"]
    return rng.choice(texts)


def _join(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    a, b = t
    if a.dim() != b.dim() or a.dim() == 0:
        return None
    differing = [d for d in range(a.dim()) if a.shape[d] != b.shape[d]]
    if len(differing) > 1:
        return None
    d = differing[0] if differing else dim_of(rng, a)
    if differing:
        return f"torch.cat([{{0}}, {{1}}], {d})"
    return one_of(
        rng,
        f"torch.cat([{{0}}, {{1}}], {d})",
        f"torch.cat([{{1}}, {{0}}, {{1}}], {d})",
        f"torch.stack([{{0}}, {{1}}], {d})",
    )


# ---- indexing ----


def _index(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x, i = t
    if not is_index(i) or x.dim() == 0 or i.numel() == 0 or x.numel() == 0 or 0 in x.shape:
        return None
    d = dim_of(rng, x)
    safe = f"({{1}} % {{0}}.shape[{d}]).to(torch.int64)"
    texts = []
    if i.dim() == 1:
        texts += [f"{{0}}.index_select({d}, {safe})", "{0}[{1} % {0}.shape[0]]"]
        if x.dim() == 2:
            texts += ["F.embedding(({1} % {0}.shape[0]).to(torch.int64), {0})"]
        texts += ["torch.zeros_like({0}).index_add(0, ({1} % {0}.shape[0]).long(), {0}[{1} % {0}.shape[0]])"]
    if i.dim() <= 2:
        texts += ["{0}[{1} % {0}.shape[0]]", "{0}[..., {1} % {0}.shape[-1]]"]
    if i.dim() == x.dim() and all(
        a <= b for k, (a, b) in enumerate(zip(i.shape, x.shape, strict=True)) if k != d % x.dim()
    ):
        texts += [f"{{0}}.gather({d}, {safe})"] * 3
        if all(a <= b for a, b in zip(i.shape, x.shape, strict=True)):
            texts += [f"torch.zeros_like({{0}}).scatter_add({d}, {safe}, {{0}})"]
    return rng.choice(texts) if texts else None


# ---- writes ----


def _write(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x = t[0]
    if not is_float(x):
        return (
            one_of(rng, "{0}.add_(1)", "{0}.zero_()", "{0}[..., :1] = 2") if is_int(x) and x.dim() else None
        )
    texts = [
        "{0}.mul_(0.5)",
        "{0}.add_(1)",
        "{0}.relu_()",
        "{0}.neg_()",
        "{0}.clamp_(-1, 1)",
        "{0}.tanh_()",
        "{0}.zero_()",
    ]
    if x.dim():
        texts += [
            "{0}[..., 0] = 0.5",
            "{0}[..., :1].mul_(2)",
            "{0}[0].add_(1)" if x.shape[0] else "{0}.neg_()",
            "{0}.fill_(0.25)",
            "{0}.copy_(2)",
            "{0}.select(-1, -1).copy_({0}.select(-1, 0))" if x.shape[-1] else "{0}.neg_()",
            "{0}[..., 1:].sub_(1)",
            "{0}.transpose(0, -1)[:1].fill_(3)",
            "{0}.masked_fill_({0} > {0} - 1, 0.5)",
        ]
    return rng.choice(texts)


def _write_from(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x, y = t
    if not is_float(x) or not is_float(y):
        return None
    if x.shape == y.shape:
        return one_of(
            rng,
            "{0}.copy_({1})",
            "{0}.add_({1})",
            "{0}.mul_({1})",
            "{0}[...] = {1}",
            "{0}.addcmul_({1}, {1})" if x.dtype == y.dtype else "{0}.copy_({1})",
        )
    if y.dim() <= x.dim() and broadcast(x, y) and torch.broadcast_shapes(x.shape, y.shape) == x.shape:
        return one_of(rng, "{0}.add_({1})", "{0}.copy_({1})", "{0}.sub_({1})")
    return None


def _factory(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x = t[0]
    if x.dim() == 0:
        return one_of(rng, "torch.zeros_like({0})", "torch.full((3,), 1.5)", "torch.arange(4)")
    return one_of(
        rng,
        "torch.arange({0}.shape[0])",
        "torch.zeros_like({0})",
        "torch.ones({0}.shape[-1])",
        "torch.full_like({0}, 2)",
        "torch.eye({0}.shape[-1])",
        "torch.arange({0}.shape[-1], dtype=torch.float32) * 0.125",
        "torch.linspace(0, 1, {0}.shape[0])",
        "torch.full(({0}.shape[0], 2), 0.5)",
        "torch.tensor([0.5, 1.5, -2.0])",
        "torch.ones({0}.shape, dtype=torch.bool).tril()"
        if x.dim() > 1
        else "torch.ones({0}.shape[0], dtype=torch.int64)",
        "{0}.shape[0] * torch.ones(2)",
    )


RULES: tuple[Rule, ...] = (
    Rule("unary", 1, _unary, weight=5),
    Rule("unary_exact", 1, _unary_exact, exact=True, weight=2),
    Rule("jump", 1, _jump, exact=True, exact_in=True, weight=2),
    Rule("int_unary", 1, _int_unary, exact=True, weight=2),
    Rule("binary", 2, _binary(BINARY, is_float), weight=6),
    Rule("binary_exact", 2, _binary(BINARY_EXACT, is_float), exact=True, weight=1),
    Rule("binary_jump", 2, _binary(BINARY_JUMPS, is_float), exact=True, exact_in=True, weight=1),
    Rule("int_binary", 2, _binary(INT_BINARY, is_int), exact=True, weight=2),
    Rule("bool_binary", 2, _bool_binary, exact=True),
    Rule("masked", 2, _masked, exact=True, weight=2),
    Rule("cast", 1, _cast, weight=1),
    Rule("reduce", 1, _reduce, weight=6),
    Rule("reduce_exact", 1, _reduce_exact, exact=True, exact_in=True, weight=2),
    Rule("view", 1, _view, exact=True, weight=7),
    Rule("data_movement", 1, _data_movement, exact=True, weight=3),
    Rule("join", 2, _join, exact=True, weight=3),
    Rule("index", 2, _index, weight=4),
    Rule("write", 1, _write, inplace=True, weight=2),
    Rule("write_from", 2, _write_from, inplace=True, weight=2),
    Rule("factory", 1, _factory, weight=2),
)

"""Operators graded by DeepLink that PyTorch's database has no row for, in the same form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

from .opdb import Operator, Sample

Make = Callable[..., torch.Tensor]
FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
WIDE = frozenset({torch.float32, torch.float64})


def _same(x: Any) -> Any:
    return x


def row(
    name: str,
    call: Callable[..., Any],
    samples: Callable[[Make], Iterator[tuple[Any, ...]]],
    dtypes: frozenset[torch.dtype] = FLOATS,
    gradient: bool = True,
) -> Operator:
    """A row from a function that yields argument tuples, given a tensor maker `make(*shape)`."""

    def own(dtype: torch.dtype, requires_grad: bool) -> Iterator[Sample]:
        def make(*shape: int) -> torch.Tensor:
            return torch.testing.make_tensor(
                shape,
                dtype=dtype,
                device=torch.get_default_device(),
                low=-2,
                high=2,
                requires_grad=requires_grad and dtype.is_floating_point,
            )

        for args in samples(make):
            yield Sample(args, {}, _same, False)

    return Operator(
        name,
        call,
        None,
        "accumulating",
        False,
        False,
        1,
        dtypes,
        dtypes & FLOATS if gradient else frozenset(),
        own_samples=own,
    )


# ---- attention and positions, as models write them ----


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding.   x: [B, H, S, D]; cos, sin: [S, D]"""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """LLaMA's feed-forward block.   x: [B, S, K]; gate, up: [N, K]; down: [K, N]"""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention spelled out, with an additive bias.   q: [B, H, S, D]; k, v: [B, Hkv, T, D]"""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return (scores if bias is None else scores + bias).softmax(-1) @ v


def alibi(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention with linear biases and a causal mask."""
    heads, length = q.shape[1], q.shape[2]
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    bias = (slopes[:, None, None] * distance).masked_fill(distance > 0, float("-inf"))
    return attend(q, k, v, bias.to(q.dtype))


def latent(
    x: torch.Tensor, down: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int
) -> torch.Tensor:
    """Multi-head latent attention: keys and values from one low-rank latent.   x: [B, S, K]; down: [R, K];
    key, value: [K, R]
    """

    def split(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(-1, (heads, -1)).transpose(1, 2)

    c = F.linear(x, down)
    out = attend(split(x), split(F.linear(c, key)), split(F.linear(c, value)))
    return out.transpose(1, 2).flatten(-2)


def factorized(
    x: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query: torch.Tensor, heads: int
) -> torch.Tensor:
    """Multi-matrix factorization attention: many query heads through one factor, one shared key and value
    head.
    """
    q = F.linear(F.linear(x, query[0]), query[1]).unflatten(-1, (heads, -1)).transpose(1, 2)
    return attend(q, F.linear(x, key)[:, None], F.linear(x, value)[:, None]).transpose(1, 2).flatten(-2)


def strided_sparse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, stride: int) -> torch.Tensor:
    """The strided pattern of sparse transformers, as a mask."""
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    keep = (j <= i) & (((i - j) < stride) | ((i - j) % stride == 0))
    return attend(q, k, v, torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, float("-inf")))


def grouped_query(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """`scaled_dot_product_attention` with fewer key than query heads."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def _attention(make: Make) -> Iterator[tuple[Any, ...]]:
    yield make(2, 4, 8, 16), make(2, 2, 8, 16), make(2, 2, 8, 16)
    yield make(1, 6, 5, 8), make(1, 1, 5, 8), make(1, 1, 5, 8)


# ---- sparse matrices: dense tensors in and out, sparse inside ----


def sparse_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """COO times dense."""
    return torch.sparse.mm(a.to_sparse(), b)


def sparse_addmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Dense plus COO times dense."""
    return torch.sparse.addmm(c, a.to_sparse(), b)


def sparse_softmax(a: torch.Tensor) -> torch.Tensor:
    """Over the stored elements of each row."""
    return torch.sparse.softmax(a.to_sparse(), dim=1).to_dense()


def sparse_log_softmax(a: torch.Tensor) -> torch.Tensor:
    """Over the stored elements of each row."""
    return torch.sparse.log_softmax(a.to_sparse(), dim=1).to_dense()


def sparse_sum(a: torch.Tensor, dim: int) -> torch.Tensor:
    """Over one sparse dimension."""
    return torch.sparse.sum(a.to_sparse(), dim=dim).to_dense()


EXTRA: tuple[Operator, ...] = (
    row(
        "extra.fold",
        F.fold,
        lambda m: iter([(m(2, 12, 9), (4, 4), (2, 2)), (m(1, 8, 4), (4, 5), (2, 2), 1, 0, (2, 3))]),
    ),
    row("extra.conv_tbc", torch.conv_tbc, lambda m: iter([(m(7, 2, 4), m(3, 4, 5), m(5), 1)]), WIDE),
    row(
        "extra.affine_grid",
        F.affine_grid,
        lambda m: iter([(m(2, 2, 3), [2, 3, 4, 5], False), (m(1, 3, 4), [1, 1, 3, 4, 5], True)]),
    ),
    row("extra.detach", lambda x: x.detach() * x, lambda m: iter([(m(3, 4),), (m(5),)])),
    row("extra.poisson", torch.poisson, lambda m: iter([(m(8, 8).detach().abs(),)]), gradient=False),
    row("extra.randperm", lambda x: x[torch.randperm(x.shape[0])], lambda m: iter([(m(16, 3),)])),
    row(
        "extra.rotary",
        rotary,
        lambda m: iter([(m(2, 3, 8, 16), m(8, 16), m(8, 16)), (m(1, 1, 5, 6), m(5, 6), m(5, 6))]),
    ),
    row("extra.swiglu", swiglu, lambda m: iter([(m(2, 5, 8), m(12, 8), m(12, 8), m(8, 12))])),
    row("extra.attention", attend, _attention),
    row(
        "extra.grouped_query_attention",
        grouped_query,
        lambda m: iter([(*a, causal) for a in _attention(m) for causal in (False, True)]),
    ),
    row("extra.cross_attention", attend, lambda m: iter([(m(2, 4, 3, 8), m(2, 4, 7, 8), m(2, 4, 7, 8))])),
    row("extra.alibi_attention", alibi, _attention),
    row("extra.latent_attention", latent, lambda m: iter([(m(2, 5, 12), m(6, 12), m(12, 6), m(12, 6), 3)])),
    row(
        "extra.factorized_attention",
        factorized,
        lambda m: iter([(m(2, 5, 12), m(8, 12), m(8, 12), [m(6, 12), m(24, 6)], 3)]),
    ),
    row("extra.sparse_attention", strided_sparse, lambda m: iter([(*a, 3) for a in _attention(m)])),
    row("extra.sparse_mm", sparse_mm, lambda m: iter([(m(4, 5), m(5, 3))]), WIDE),
    row("extra.sparse_addmm", sparse_addmm, lambda m: iter([(m(4, 3), m(4, 5), m(5, 3))]), WIDE),
    row("extra.sparse_softmax", sparse_softmax, lambda m: iter([(m(4, 5),)]), WIDE),
    row("extra.sparse_log_softmax", sparse_log_softmax, lambda m: iter([(m(4, 5),)]), WIDE),
    row("extra.sparse_sum", sparse_sum, lambda m: iter([(m(4, 5), 0), (m(4, 5), 1)]), WIDE),
)

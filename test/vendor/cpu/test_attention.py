"""Attention by tiles around oneDNN's micro-kernels, and of few rows: against float64, under the rule of all tests (no further from
it than twice eager), and which calls the tiles serve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dicp.compiler import Compiled, observe
from dicp.vendor.cpu_graph.claims.common import LOW, multiplies
from dicp.vendor.cpu_graph.microkernels import available

INF = float("inf")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(3)
    yield


def operands(
    dtype: torch.dtype, heads: int, kv_heads: int, rows: int, keys: int, depth: int, depth_v: int
) -> list[torch.Tensor]:
    q = torch.randn(2, rows, heads, depth, dtype=dtype).transpose(1, 2)
    k = torch.randn(2, keys, kv_heads, depth, dtype=dtype).transpose(1, 2)
    return [q, k, torch.randn(2, kv_heads, keys, depth_v, dtype=dtype)]


def mask_of(kind: str | None, heads: int, rows: int, keys: int, dtype: torch.dtype) -> torch.Tensor | None:
    closed = torch.zeros(rows, keys).masked_fill(torch.rand(rows, keys) < 0.4, -INF)
    closed[1:2] = -INF  # a row of which nothing is open
    closed[2:3, : keys // 2 + 300] = -INF  # and one whose first block of keys is closed
    return {
        None: None,
        "added": closed.to(dtype),
        "per head": torch.randn(2, heads, 1, keys, dtype=dtype),
        "per row": torch.randn(1, 1, rows, 1, dtype=dtype).expand(1, 1, rows, keys),
        "transposed": torch.randn(keys, rows, dtype=dtype).t(),
        "bool": closed == 0,
    }[kind]


def close(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    unit = torch.finfo(got.dtype).eps * exact.abs().max().item()
    mine, theirs = ((x.double() - exact).abs().max().item() for x in (got, eager))
    assert mine <= 2 * theirs + unit, f"{mine:.2e} from float64, eager {theirs:.2e}"


def programs(fn: Any, *args: Any, **how: Any) -> tuple[Any, list[Compiled]]:
    seen: list[Compiled] = []
    with observe(seen.append):
        result = torch.compile(fn, backend="dicp_cpu", **how)(*args)
    return result, seen


def claims(seen: list[Compiled]) -> list[str]:
    return [c.claim.name for s in seen for c in s.program.library_calls]


def expected(dtype: torch.dtype, rows: int = 40) -> str:
    if rows <= 8:
        return "attention: few rows"
    wide = dtype in LOW and not multiplies(dtype)  # the tiles then convert what they load
    return "attention: tiles" if available(torch.float32 if wide else dtype) else "attention: flash"


CASES: dict[str, tuple[int, int, int, int, int, int, bool, str | None]] = {
    # heads, heads of k and v, rows, keys, depth, depth of v, causal, mask
    "one block": (2, 2, 40, 40, 64, 64, False, None),
    "many blocks": (1, 1, 300, 1100, 32, 32, False, None),
    "odd sizes": (3, 3, 33, 517, 10, 6, False, None),
    "causal": (2, 2, 300, 300, 64, 64, True, None),
    "causal, more rows than keys": (2, 2, 200, 65, 32, 32, True, None),
    "causal, more keys than rows": (2, 2, 65, 600, 32, 32, True, None),
    "shared keys": (4, 2, 40, 90, 16, 16, False, None),
    "added mask": (2, 2, 40, 700, 32, 32, False, "added"),
    "mask per head": (2, 2, 40, 90, 32, 32, False, "per head"),
    "mask per row": (2, 2, 40, 90, 32, 32, False, "per row"),
    "transposed mask": (2, 2, 40, 90, 32, 32, False, "transposed"),
    "bool mask": (2, 2, 40, 700, 32, 32, False, "bool"),
    "one row": (2, 2, 1, 519, 64, 64, False, None),
    "one row, shared keys": (6, 2, 1, 1030, 32, 32, False, None),
    "few rows, odd sizes": (3, 3, 5, 1021, 13, 19, False, None),
    "few rows, causal": (2, 2, 7, 517, 32, 32, True, None),
    "few rows, added mask": (4, 2, 3, 700, 32, 32, False, "added"),
    "few rows, mask per head": (4, 2, 3, 700, 32, 32, False, "per head"),
    "few rows, transposed mask": (2, 2, 8, 700, 32, 32, False, "transposed"),
    "few rows, bool mask": (2, 2, 4, 700, 32, 32, False, "bool"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dtype: torch.dtype) -> None:
    heads, kv_heads, rows, keys, depth, depth_v, causal, kind = CASES[name]
    args = operands(dtype, heads, kv_heads, rows, keys, depth, depth_v)
    mask = mask_of(kind, heads, rows, keys, dtype)

    def fn(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
        shared = kv_heads != heads
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=shared)

    exact_mask = mask.double() if mask is not None and mask.dtype != torch.bool else mask
    exact = fn(*(a.double() for a in args), exact_mask)
    got, seen = programs(fn, *args, mask)
    close(got, fn(*args, mask), exact)
    assert got.stride() == fn(*args, mask).stride()
    if depth == depth_v:  # eager's own call has no other form, and what it makes of them is no attention node
        assert claims(seen) == [expected(dtype, rows)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows, keys", [(150, 150), (6, 600)])
def test_gradients(dtype: torch.dtype, causal: bool, rows: int, keys: int) -> None:
    """The logarithms of the rows' sums, which the backward reads."""

    def grads(args: list[torch.Tensor], fn: Any) -> list[torch.Tensor]:
        leaves = [a.detach().clone().requires_grad_() for a in args]
        fn(*leaves).square().sum().backward()
        return [a.grad for a in leaves]  # type: ignore[misc]

    def fn(q: Any, k: Any, v: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)

    torch.manual_seed(0)  # one element of the queries' gradients decides, by luck where there are few
    args = operands(dtype, 2, 2, rows, keys, 32, 32)
    seen: list[Compiled] = []
    with observe(seen.append):
        got = grads(args, torch.compile(fn, backend="dicp_cpu"))
    for g, e, x in zip(got, grads(args, fn), grads([a.double() for a in args], fn)):
        close(g, e, x)
    assert claims(seen)[0] == expected(dtype, rows)


def test_sizes_may_change() -> None:
    fn = torch.compile(F.scaled_dot_product_attention, backend="dicp_cpu", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, keys in ((40, 90), (130, 514), (2, 3), (64, 512)):
            args = operands(torch.float32, 2, 2, rows, keys, 16, 16)
            exact = F.scaled_dot_product_attention(*(a.double() for a in args))
            close(fn(*args), F.scaled_dot_product_attention(*args), exact)


def test_operands_may_lie_anywhere() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x[:, 1:].reshape(2, 48, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 48, 32)

    x = torch.randn(2, 49, 96)
    close(programs(fn, x)[0], fn(x), fn(x.double()))


def test_nan_and_infinity_spread_as_in_eager() -> None:
    q, k, v = operands(torch.float32, 1, 1, 40, 40, 16, 16)
    q[0, 0, 3, 0], k[1, 0, 5, 1], v[1, 0, 7, 2] = float("nan"), INF, INF
    got, _ = programs(F.scaled_dot_product_attention, q, k, v)
    eager = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(got.isnan(), eager.isnan())


def test_what_stays_with_the_library() -> None:
    attention = F.scaled_dot_product_attention
    few_rows = operands(torch.float32, 2, 2, 16, 90, 16, 16)
    assert claims(programs(attention, *few_rows)[1]) == ["attention: flash"]
    half = operands(torch.float16, 2, 2, 40, 40, 16, 16)
    assert claims(programs(attention, *half)[1]) == [expected(torch.float16)]
    single = operands(torch.float32, 2, 2, 40, 40, 16, 16)
    exact = programs(attention, *single, options={"numerics": "eager"})[1]
    assert claims(exact) == ["attention: flash"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("depths", [(48, 32), (32, 48), (290, 16)])
def test_values_of_another_depth(depths: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    """ATen's kernels serve none such: what no template serves either stays as written."""
    args = operands(dtype, 4, 2, rows, 70, *depths)

    def fn(q: Any, k: Any, v: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    exact = fn(*(a.double() for a in args))
    for isa in ("auto", "portable"):
        torch._dynamo.reset()
        got, _ = programs(fn, *args, options={"isa": isa})
        close(got, fn(*args), exact)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("of", [torch.int64, torch.uint8, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [16, 40])
def test_masks_of_other_dtypes(rows: int, dtype: torch.dtype, of: torch.dtype) -> None:
    args = operands(dtype, 2, 2, rows, 20, 16, 16)
    added = 7 if of == torch.uint8 else -1000

    def fn(q: Any, k: Any, v: Any, closed: Any) -> torch.Tensor:
        one, zero = (torch.full((), number, dtype=of) for number in (added, 0))  # known to be finite
        scores = q @ k.transpose(-1, -2) + torch.where(closed, one, zero)
        return scores.softmax(-1).to(v.dtype) @ v

    closed = torch.rand(rows, 20) < 0.4
    got, _ = programs(fn, *args, closed)
    close(got, fn(*args, closed), fn(*(a.double() for a in args), closed))


@pytest.mark.parametrize("shape", [(16, 1), (4, 16, 16), (4, 1, 16)])
def test_masks_of_any_dims(shape: tuple[int, ...]) -> None:
    """ATen's kernels, which serve so few rows, take two dims or four."""
    q, k, v = operands(torch.float32, 4, 4, 16, 16, 8, 8)
    mask = torch.randn(shape)
    got, seen = programs(F.scaled_dot_product_attention, q, k, v, mask)
    assert claims(seen) == ["attention: flash"]
    exact = F.scaled_dot_product_attention(*(a.double() for a in (q, k, v, mask)))
    close(got, F.scaled_dot_product_attention(q, k, v, mask), exact)


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_code_for_a_lesser_processor(isa: str) -> None:
    """The micro-kernels are this processor's, whatever the tiles around them are compiled for."""
    given = operands(torch.float32, 2, 2, 40, 300, 16, 16)
    result, seen = programs(F.scaled_dot_product_attention, *given, options={"isa": isa})
    assert claims(seen) == [expected(torch.float32)]
    exact = F.scaled_dot_product_attention(*(t.double() for t in given))
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-6)


def folded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Groups of heads as batches."""
    b, shared, s, d = k.shape
    repeats = q.shape[1] // shared
    k, v = (t[:, :, None].expand(b, shared, repeats, s, d).reshape(-1, repeats, s, d) for t in (k, v))
    return F.scaled_dot_product_attention(q.reshape(b * shared, repeats, -1, d), k, v)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("batch, heads, shared", [(2, 8, 4), (2, 8, 2), (1, 8, 2), (3, 8, 1)])
def test_groups_of_heads_as_batches(batch: int, heads: int, shared: int, dynamic: bool | None) -> None:
    q, k, v = (torch.randn(batch, h, s, 16) for h, s in ((heads, 40), (shared, 48), (shared, 48)))
    got = torch.compile(folded, backend="dicp_cpu", dynamic=dynamic)(q, k, v)
    torch.testing.assert_close(got, folded(q, k, v))


@pytest.mark.parametrize(
    "q, k, v, scores",
    [
        ((2, 3), (6,), (6,), (6, 1)),
        ((2, 3), (6,), (6,), (1, 6)),
        ((6,), (6,), (2, 3), (3, 2)),
        ((12,), (12,), (4, 3), (2, 6)),
        ((2, 3), (3, 2), (2, 3), (6, 1)),
        ((8, 2), (2, 8), (2, 8), (4, 4)),
        ((2, 3), (2, 3), (2, 3), (2, 3)),
    ],
)
def test_operands_in_groups_of_their_own(q: Any, k: Any, v: Any, scores: Any) -> None:
    """Each with another batch and other heads, and the same matrices in the same order."""

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        flat_q, flat_k, flat_v = (t.reshape(-1, *t.shape[-2:]) for t in (q, k, v))
        weights = (flat_q @ flat_k.mT).view(*scores, 40, 48).softmax(-1)
        return torch.bmm(weights.view(-1, 40, 48), flat_v).view(*scores, 40, 16)

    given = [torch.randn(*dims, rows, 16) for dims, rows in ((q, 40), (k, 48), (v, 48))]
    torch.testing.assert_close(torch.compile(fn, backend="dicp_cpu")(*given), fn(*given))

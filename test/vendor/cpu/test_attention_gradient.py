"""Gradients of attention by tiles: against float64 under the rule of all tests (no further from it than twice eager),
over sizes that are no multiple of a tile, masks and layouts; and which calls they serve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dicp.compiler import Compiled, observe
from dicp.vendor.cpu_graph.claims.attention import multiplied

DTYPES = [d for d in (torch.float32, torch.bfloat16) if multiplied(d) == d]
pytestmark = pytest.mark.skipif(not DTYPES, reason="no micro-kernels for this processor")
TILES, LIBRARY = "attention backward: tiles", "attention backward: flash"
NEVER = float("-inf")


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(7)
    yield


# batch, heads, query rows, keys, depth, causal, mask
CASES: dict[str, tuple[int, int, int, int, int, bool, str | None]] = {
    "one tile": (2, 3, 128, 128, 64, False, None),
    "tails": (2, 2, 77, 301, 30, False, None),
    "several tiles": (1, 2, 300, 600, 64, False, None),
    "causal": (2, 2, 333, 333, 80, True, None),
    "causal, more keys": (1, 2, 100, 300, 16, True, None),
    "causal, more queries": (1, 2, 300, 100, 16, True, None),
    "full mask": (2, 2, 140, 270, 32, False, "full"),
    "mask of each head": (2, 3, 64, 90, 32, False, "heads"),
    "turned mask": (1, 2, 70, 90, 32, False, "turned"),
    "padding": (3, 2, 130, 130, 64, False, "padding"),
    "forbidden": (1, 2, 100, 100, 64, False, "forbidden"),
}


def operands(case: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]:
    """Queries, keys and values [batch, heads, rows, depth] as projections make them; a gradient; a mask."""
    batch, heads, rows, keys, depth, _, kind = CASES[case]
    qkv = [
        torch.randn(batch, n, heads, depth).to(dtype).transpose(1, 2).requires_grad_()
        for n in (rows, keys, keys)
    ]
    mask = {
        None: lambda: None,
        "full": lambda: torch.randn(rows, keys),
        "heads": lambda: torch.randn(batch, heads, rows, keys),
        "turned": lambda: torch.randn(keys, rows).t(),
        "padding": lambda: torch.zeros(batch, 1, 1, keys).masked_fill(torch.arange(keys) > keys // 2, NEVER),
        "forbidden": lambda: torch.zeros(rows, keys).masked_fill(torch.rand(rows, keys) < 0.7, NEVER),
    }[kind]()
    if mask is not None:
        mask = mask.to(dtype)
    return qkv, torch.randn(batch, heads, rows, depth).to(dtype), mask


def attention(q: Any, k: Any, v: Any, mask: Any, causal: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def gradients(fn: Any, qkv: list[torch.Tensor], grad: torch.Tensor, *how: Any) -> list[torch.Tensor]:
    return list(torch.autograd.grad([fn(*qkv, *how)], qkv, [grad]))


def compiled(qkv: list[torch.Tensor], grad: torch.Tensor, *given: Any, **how: Any) -> tuple[Any, list[str]]:
    """Attention, and the names of the calls in what its gradients compiled."""
    seen: list[Compiled] = []
    run = torch.compile(attention, backend="dicp_cpu", **how)
    with observe(seen.append):
        gradients(run, qkv, grad, *given)
    return run, [c.claim.name for s in seen for c in s.program.library_calls if "backward" in c.claim.name]


def check(run: Any, qkv: list[torch.Tensor], grad: torch.Tensor, mask: Any, causal: bool) -> None:
    wide = [t.detach().double().requires_grad_() for t in qkv]
    exact = gradients(attention, wide, grad.double(), None if mask is None else mask.double(), causal)
    mine, theirs = (gradients(f, qkv, grad, mask, causal) for f in (run, attention))
    for got, eager, right in zip(mine, theirs, exact, strict=True):
        unit = 4 * torch.finfo(got.dtype).eps * right.abs().max().item()
        errors = [(x.double() - right).abs().max().item() for x in (got, eager)]
        assert got.dtype == eager.dtype and errors[0] <= 2 * errors[1] + unit, errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_values(case: str, dtype: torch.dtype) -> None:
    qkv, grad, mask = operands(case, dtype)
    causal = CASES[case][5]
    run, calls = compiled(qkv, grad, mask, causal)
    assert calls == [TILES]
    check(run, qkv, grad, mask, causal)


@pytest.mark.parametrize("asked", [(0,), (1,), (0, 2)])
def test_some_of_the_gradients(asked: tuple[int, ...]) -> None:
    qkv, grad, _ = operands("one tile", torch.float32)
    given = [t.detach().requires_grad_(k in asked) for k, t in enumerate(qkv)]
    run = torch.compile(attention, backend="dicp_cpu")
    found = (
        torch.autograd.grad([f(*given, None, False)], [given[k] for k in asked], [grad])
        for f in (run, attention)
    )
    for got, eager in zip(*found, strict=True):
        torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("isa", ["avx2", "portable"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_instruction_sets(dtype: torch.dtype, isa: str) -> None:
    qkv, grad, mask = operands("tails", dtype)
    run, calls = compiled(qkv, grad, mask, False, options={"isa": isa})
    assert calls == [TILES]
    check(run, qkv, grad, mask, False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_heads_share_keys(dtype: torch.dtype) -> None:
    """As ATen's op takes them; against keys that are repeated."""
    heads, group, rows, depth = 6, 3, 150, 32
    q = torch.randn(2, heads, rows, depth).to(dtype)
    k, v = (torch.randn(2, heads // group, rows, depth).to(dtype) for _ in range(2))
    grad = torch.randn_like(q)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def fn(grad: Any, q: Any, k: Any, v: Any) -> Any:
        out, log_sum = forward(q, k, v, 0.0, True, scale=0.3)
        return backward(grad, q, k, v, out, log_sum, 0.0, True, scale=0.3)

    seen: list[Compiled] = []
    with torch.no_grad(), observe(seen.append):
        got = torch.compile(fn, backend="dicp_cpu")(grad, q, k, v)
    assert TILES in [c.claim.name for s in seen for c in s.program.library_calls]
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    repeated = [wide[0], *(t.repeat_interleave(group, 1) for t in wide[1:])]
    y = F.scaled_dot_product_attention(*repeated, is_causal=True, scale=0.3)
    exact = torch.autograd.grad([y], wide, [grad.double()])
    for mine, right in zip(got, exact, strict=True):
        assert (mine.double() - right).norm() <= 8 * torch.finfo(dtype).eps * right.norm()


def test_rows_of_which_all_is_masked_have_no_gradient() -> None:
    qkv, grad, _ = operands("one tile", torch.float32)
    mask = torch.zeros(128, 128)
    mask[5:40] = NEVER
    run, calls = compiled(qkv, grad, mask, False)
    assert calls == [TILES]
    dq, dk, dv = gradients(run, qkv, grad, mask, False)
    assert (dq[:, :, 5:40] == 0).all() and dq[:, :, 41].abs().min() > 0
    rest = torch.cat([torch.arange(5), torch.arange(40, 128)])
    fewer = [qkv[0].detach()[:, :, rest].requires_grad_(), *qkv[1:]]
    exact = gradients(attention, fewer, grad[:, :, rest], None, False)
    for got, right in zip((dq[:, :, rest], dk, dv), exact, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


def test_sizes_that_vary() -> None:
    qkv, grad, _ = operands("several tiles", torch.float32)
    for t in qkv:
        torch._dynamo.mark_dynamic(t, 2)
    run, calls = compiled(qkv, grad, None, False)
    assert calls == [TILES]
    for rows, keys in ((40, 700), (260, 33), (129, 257)):
        given = [torch.randn(1, n, 2, 64).transpose(1, 2).requires_grad_() for n in (rows, keys, keys)]
        check(run, given, torch.randn(1, 2, rows, 64), None, False)


def test_what_is_the_librarys() -> None:
    """Few rows, depths that make no pairs, and eager's numerics."""
    for rows, depth, options in ((16, 64, {}), (64, 33, {}), (64, 64, {"numerics": "eager"})):
        torch._dynamo.reset()
        qkv = [torch.randn(1, rows, 2, depth).transpose(1, 2).requires_grad_() for _ in range(3)]
        calls = compiled(qkv, torch.randn(1, 2, rows, depth), None, False, options=options)[1]
        assert calls in ([LIBRARY], []), calls

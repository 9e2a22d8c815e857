"""Attention as a template: masks of every kind and stride, grouped heads, depths, tails; interpreted and compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels import compile_everywhere
from templates import run, view

from dicp import compiler
from dicp.config import Config
from dicp.dynamo_bridge.backend import dicp_cuda
from dicp.ops.library import attention as reference
from dicp.vendor.cuda_graph.attention import _spread, tilings
from dicp.vendor.cuda_graph.templates import Operand
from dicp.vendor.cuda_graph.templates.attention import Attention, Tiling, kernels

B, H, S, T, D = 2, 4, 21, 37, 24
TILING = Tiling(16, 16)
SPLIT = Tiling(16, 16, parts=4)
"""37 keys are three steps: of four parts one is empty."""
MASKS: dict[str, Callable[[], torch.Tensor | None]] = {
    "none": lambda: None,
    "added": lambda: torch.randn(B, H, S, T),
    "columns": lambda: torch.randn(B, 1, 1, T),
    "rows": lambda: torch.randn(S, 1),
    "expanded": lambda: torch.randn(B, 1, S, T).expand(B, H, S, T),
    "half": lambda: torch.randn(1, H, S, T).bfloat16(),
    "bools": lambda: torch.rand(B, 1, S, T) > 0.5,
    "closed_rows": lambda: (torch.rand(S, T) > 0.5) & (torch.arange(S) % 3 > 0)[:, None],
    "infinite": lambda: torch.zeros(S, T).masked_fill(torch.arange(S)[:, None] % 2 == 0, float("-inf")),
}


@pytest.fixture(scope="module")
def config(cuda_cache: str) -> Config:
    return Config.make(options={"cache_dir": cuda_cache, "interpret": True})


def attention(
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    kv_heads: int = H,
    rows: int = S,
    depth: int = D,
    value_depth: int = D,
    dtype: torch.dtype = torch.float32,
    packed: bool = False,
    log_rows: int = 0,
) -> tuple[Attention, dict[str, torch.Tensor]]:
    tensors = {
        "q": torch.randn(B, rows, H, depth).transpose(1, 2).to(dtype),
        "k": torch.randn(B, kv_heads, T, depth).to(dtype),
        "v": torch.randn(B, kv_heads, T, value_depth).to(dtype),
        "out": torch.full((B, rows, H, value_depth), float("nan")).transpose(1, 2).to(dtype),
    }
    tensors |= {"mask": mask} if mask is not None else {}
    tensors |= {"log_sum": torch.full((B, H, log_rows), float("nan"))} if log_rows else {}
    views = {name: view(name, t) for name, t in tensors.items()}
    given = {n: Operand(n, v, _spread(v) if n == "mask" else v.strides) for n, v in views.items()}
    sizes = (B, H, H // kv_heads, rows, T, depth, value_depth, 0.3, causal)
    return Attention(*sizes, **given, log_rows=log_rows, packed=packed), tensors


def check(
    made: Attention, tensors: dict[str, torch.Tensor], config: Config, tiling: Tiling = TILING, **how: Any
) -> None:
    run(kernels(made, tiling, ()), tensors, config, **how)
    q, k, v = (tensors[n].double() for n in "qkv")
    mask = tensors.get("mask")
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    want = reference(q, k, v, mask, made.causal, made.scale)
    loose = 1e-5 if tensors["out"].dtype == torch.float32 else 2e-2
    torch.testing.assert_close(tensors["out"].double(), want, rtol=loose, atol=loose)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tiling", [TILING, SPLIT], ids=["whole", "parts"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, causal: bool, tiling: Tiling, config: Config) -> None:
    check(*attention(MASKS[mask](), causal=causal), config, tiling)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tiling", [TILING, SPLIT], ids=["whole", "parts"])
def test_depths_and_dtypes(dtype: torch.dtype, tiling: Tiling, config: Config) -> None:
    check(*attention(dtype=dtype, value_depth=40, causal=True), config, tiling)


@pytest.mark.parametrize("tiling", [TILING, SPLIT], ids=["whole", "parts"])
@pytest.mark.parametrize("rows, packed", [(21, False), (3, True), (1, True), (9, True)])
def test_grouped_heads(rows: int, packed: bool, tiling: Tiling, config: Config) -> None:
    mask = torch.randn(B, H, rows, T)
    check(*attention(mask, kv_heads=2, rows=rows, packed=packed, causal=rows == 9), config, tiling)


@pytest.mark.parametrize("tiling", [TILING, SPLIT], ids=["whole", "parts"])
def test_64_bit_positions(tiling: Tiling, config: Config) -> None:
    check(*attention(MASKS["bools"](), kv_heads=1), config, tiling, wide=True)


@pytest.mark.parametrize("tiling", [TILING, SPLIT], ids=["whole", "parts"])
def test_log_of_the_sums(tiling: Tiling, config: Config) -> None:
    """Closed rows and those beyond the end are infinite: what they scored then weighs nothing."""
    mask = torch.ones(S, T, dtype=torch.bool)
    mask[4] = False
    made, tensors = attention(mask, log_rows=32)
    check(made, tensors, config, tiling)
    scores = (tensors["q"] @ tensors["k"].transpose(2, 3) * made.scale).masked_fill(~mask, float("-inf"))
    want = torch.full((B, H, 32), float("inf"))
    want[..., :S] = scores.logsumexp(-1)
    want[..., 4] = float("inf")
    torch.testing.assert_close(tensors["log_sum"], want)


def test_it_compiles_for_every_gpu(config: Config) -> None:
    made = [
        attention(MASKS["bools"](), causal=True, dtype=torch.bfloat16, depth=64, value_depth=64, log_rows=32)[
            0
        ],
        attention(MASKS["columns"](), kv_heads=2, rows=1, packed=True)[0],
    ]
    sources = [made.template for a in made for tiling in (TILING, SPLIT) for made in kernels(a, tiling, ())]
    assert compile_everywhere(sources, config) == 3 * len(sources)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_plan_compiles_for_every_gpu(dtype: torch.dtype, depth: int, config: Config) -> None:
    made, _ = attention(MASKS["added"](), causal=True, dtype=dtype, depth=depth, value_depth=depth)
    fakes = [torch.empty(1, 8, 1024, depth, dtype=dtype, device="meta") for _ in range(3)]
    sources = [launched.template for tiling in tilings(*fakes) for launched in kernels(made, tiling, ())]
    assert compile_everywhere(sources, config) == 3 * len(sources)


def test_keys_are_split_until_the_gpu_is_full() -> None:
    def parts(batch: int, heads: int, kv_heads: int, rows: int, keys: int) -> int:
        shapes = ((heads, rows), (kv_heads, keys), (kv_heads, keys))
        fakes = [torch.empty(batch, h, n, 128, dtype=torch.bfloat16, device="meta") for h, n in shapes]
        return tilings(*fakes)[0].parts

    assert parts(1, 32, 8, 1, 4096) == 32
    assert parts(1, 32, 8, 1, 1024) == 8, "each part has two steps of 64 keys"
    assert parts(64, 32, 8, 1, 4096) == 1, "512 programs without"
    assert parts(1, 32, 32, 4096, 4096) == 1


# -- through torch.compile -----------------------------------------------------------------------------------


def test_who_serves_attention(cuda_cache: str) -> None:
    q, k = torch.randn(B, H, 5, D), torch.randn(B, H, 9, D)
    mask = torch.rand(5, 9) > 0.3

    def written_out(q: torch.Tensor, k: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-1, -2) / D**0.5).softmax(-1) @ k[..., :16]

    few, many = (k, mask), (torch.randn(B, H, 600, D), torch.rand(5, 600))
    for fn, given, template in (
        (written_out, few, True),
        (lambda q, k, m: F.scaled_dot_product_attention(q, k, k), few, False),
        (lambda q, k, m: F.scaled_dot_product_attention(q, k, k, m), many, True),
    ):
        seen: list[Any] = []
        with compiler.observe(seen.append):
            options = {"interpret": True, "cache_dir": cuda_cache}
            got = torch.compile(fn, backend=dicp_cuda, options=options)(q, *given)
        torch.testing.assert_close(got, fn(q, *given), rtol=1e-5, atol=1e-5)
        (name,) = {c.claim.name for c in seen[0].program.library_calls}
        assert (name != "attention") == template, name


@pytest.mark.parametrize(("rows", "template"), [(4, True), (40, False)])
def test_keys_are_split_for_few_queries_only(rows: int, template: bool, cuda_cache: str) -> None:
    """A token over a long cache; not a prompt whose batch leaves multiprocessors idle."""
    q, k, mask = torch.randn(B, H, rows, D), torch.randn(B, H, 600, D), torch.randn(rows, 600)
    seen: list[Any] = []
    with compiler.observe(seen.append):
        options = {"interpret": True, "cache_dir": cuda_cache}
        run = torch.compile(F.scaled_dot_product_attention, backend=dicp_cuda, options=options)
        torch.testing.assert_close(run(q, k, k, mask), F.scaled_dot_product_attention(q, k, k, mask))
    (name,) = {c.claim.name for c in seen[0].program.library_calls}
    assert (name != "attention") == template, name


def test_training_with_a_mask_of_another_dtype(cuda_cache: str) -> None:
    """The forward is the template's, whose log of the sums the library's backward reads."""
    x, y = (torch.randn(1, 2, 6, 8).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    mask = torch.rand(6, 6) > 0.4
    mask[:, 0] = True

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x * 2, x + 1, mask)

    got = torch.compile(fn, backend=dicp_cuda, options={"interpret": True, "cache_dir": cuda_cache})(x)
    got.square().sum().backward()
    fn(y).square().sum().backward()
    torch.testing.assert_close(got, fn(y), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)


def test_torchs_kernels_are_given_whole_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: operands at other addresses are copied for attention of aten's, as for dicp's own."""
    from dicp.vendor.cuda_graph import claims

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    storage = torch.zeros(64)
    whole = next(storage[k:] for k in range(4) if storage[k:].data_ptr() % claims.ALIGN == 0)
    odd = whole[1:]
    seen = claims.at_vectors(lambda *args, **kwargs: (args, kwargs))(whole, odd, 3, None, attn_mask=odd)
    (a, b, number, nothing), kwargs = seen
    assert a is whole and b is not odd and torch.equal(b, odd) and (number, nothing) == (3, None)
    assert all(t.data_ptr() % claims.ALIGN == 0 for t in (a, b, kwargs["attn_mask"]))
    op = torch.ops.aten._scaled_dot_product_efficient_attention.default
    assert claims._table()[op] is claims._attention_of_aten


def test_a_call_may_leave_the_sums_out() -> None:
    made, _ = attention()
    text = kernels(dataclasses.replace(made, log_sum=None), TILING, ())[0].template.text
    assert "log_sum" not in text


def test_rows_that_a_finite_mask_closes_for_torchs_kernels() -> None:
    """float32's lowest number is -inf in a low precision, by which a row is closed altogether. (float16's own
    lowest leaves the scores of such a row their differences: no mean, but no zeros either.)"""
    from dicp.vendor.cuda_graph.claims import attend

    mask = torch.zeros(6, 6)
    mask[2], mask[3] = torch.finfo(torch.float32).min, -torch.inf
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = (torch.randn(1, 2, 6, 16).to(dtype) for _ in range(3))
        got, exact = attend(q, k, v, mask, False, None), reference(q, k, v, mask, False, None)
        assert got[:, :, 2].abs().amin() > 0 and not got[:, :, 3].any()
        rows = [0, 1, 2, 3, 4, 5] if dtype == torch.bfloat16 else [0, 1, 3, 4, 5]
        torch.testing.assert_close(got[:, :, rows], exact[:, :, rows], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_groups_for_torchs_kernels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel for float32 knows no groups: what it has for them instead is a dozen launches."""
    from dicp.vendor.cuda_graph import claims

    asked: list[Any] = []
    own = F.scaled_dot_product_attention

    def attention(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append((k.shape[1], v.shape[1]))
        return own(q, k, v, *args, **kwargs)

    monkeypatch.setattr(claims.F, "scaled_dot_product_attention", attention)
    q, k, v = (torch.randn(2, h, 5, 16).to(dtype) for h in (6, 2, 2))
    got = claims.attend(q, k, v, None, True, None)
    assert asked == [(6, 6) if dtype == torch.float32 else (2, 2)]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, reference(q, k, v, None, True, None), rtol=tolerance, atol=tolerance)

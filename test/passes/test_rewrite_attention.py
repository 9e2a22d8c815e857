"""rewrite_attention: attention in its many spellings becomes one call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from graphs import CheckPass, claims, graph_of, graphs_of
from torch.nn.attention import SDPBackend, sdpa_kernel

from dicp.ir.printer import show
from dicp.passes.canonicalize import canonicalize
from dicp.passes.rewrite_attention import rewrite_attention

T = torch.Tensor
B, H, S, D = 2, 4, 5, 8
Q = (B, H, S, D)
FUSED = {}  # no decomposition: the operators stay


def written_out(q: T, k: T, v: T) -> T:
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(D), -1) @ v


EVERYTHING = claims()


class TestRewriteAttention(TestCase, CheckPass):
    def run_on(self, g: torch.fx.GraphModule, vendor: Any = EVERYTHING) -> str:
        g = self.check(rewrite_attention, canonicalize(g), vendor)
        return show(self.check(canonicalize, g))

    def test_written_out(self) -> None:
        self.assertExpectedInline(
            self.run_on(graph_of(written_out, Q, Q, Q)),
            """\
graph(arg0_1: f32[2,4,5,8], arg1_1: f32[2,4,5,8], arg2_1: f32[2,4,5,8]):
  v0: f32[2,4,5,8] = dicp.attention(arg1_1, arg0_1, arg2_1, None, False, 0.35355339059327373)
  v1: f32[2,4,5,8] = clone(v0, memory_format=contiguous_format)
  return v1
""",
        )

    def test_sdpa_operator(self) -> None:
        g = graph_of(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            Q,
            Q,
            Q,
            decompositions={},
        )
        self.assertExpectedInline(
            self.run_on(g),
            """\
graph(arg0_1: f32[2,4,5,8], arg1_1: f32[2,4,5,8], arg2_1: f32[2,4,5,8]):
  v0: f32[2,4,5,8] = dicp.attention(arg0_1, arg1_1, arg2_1, None, True, None)
  v1: f32[2,4,5,8] = clone(v0, memory_format=contiguous_format)
  return v1
""",
        )

    def test_sdpa_decomposed_with_mask_and_merged_heads(self) -> None:
        def f(q: T, k: T, v: T, m: T) -> T:
            return F.scaled_dot_product_attention(q, k, v, m > 0).transpose(1, 2).reshape(B, S, H * D)

        self.assertExpectedInline(
            self.run_on(graph_of(f, Q, Q, Q, (B, 1, S, S))),
            """\
graph(arg0_1: f32[2,1,5,5], arg1_1: f32[2,4,5,8], arg2_1: f32[2,4,5,8], arg3_1: f32[2,4,5,8]):
  v0: b8[2,1,5,5] = gt.Scalar(arg0_1, 0)
  v1: f32[] = scalar_tensor(-inf, dtype=f32)
  v2: f32[] = scalar_tensor(0.0, dtype=f32)
  v3: f32[2,1,5,5] = where.self(v0, v2, v1)
  v4: f32[2,4,5,8] = dicp.attention(arg1_1, arg2_1, arg3_1, v3, False, 0.35355339059327373)
  v5: f32[5,2,4,8] = permute(v4, [2,0,1,3])
  v6: f32[5,2,4,8] = clone(v5, memory_format=contiguous_format)
  v7: f32[2,5,4,8] = permute(v6, [1,0,2,3])
  v8: f32[2,5,32] = view(v7, [2,5,32])
  return v8
""",
        )

    def test_a_mask_open_everywhere_is_none(self) -> None:
        """As models make them that know no padding, and torch decomposes them in half precision."""

        def f(q: T, k: T, v: T) -> T:
            mask = (torch.arange(S)[None, None, :, None] >= 0).expand(B, 1, S, S)
            return F.scaled_dot_product_attention(q, k, v, mask)

        q = torch.randn(Q, dtype=torch.bfloat16)
        with sdpa_kernel(SDPBackend.MATH):
            g = graph_of(f, q, q, q)
        self.assertExpectedInline(
            self.run_on(g),
            """\
graph(arg0_1: bf16[2,4,5,8]):
  v0: bf16[2,4,5,8] = dicp.attention(arg0_1, arg0_1, arg0_1, None, False, 0.35355339059327373)
  v1: bf16[2,4,5,8] = clone(v0, memory_format=contiguous_format)
  return v1
""",
        )

    def test_repeated_heads_are_shared(self) -> None:
        def f(q: T, k: T, v: T) -> T:
            k, v = (t[:, :, None].expand(B, 2, 2, S, D).reshape(B, H, S, D) for t in (k, v))
            return written_out(q, k, v)

        g = graph_of(f, Q, (B, 2, S, D), (B, 2, S, D))
        text = self.run_on(g)
        self.assertIn("f32[2,4,5,8] = dicp.attention(arg2_1, arg0_1, arg1_1, None, False", text)
        unshared = claims(lambda n: n.args[1].meta["val"].shape[1] == H)
        text = self.run_on(graph_of(f, Q, (B, 2, S, D), (B, 2, S, D)), unshared)
        self.assertRegex(text, r"dicp.attention\(arg2_1, v\d+, v\d+, None")

    def test_finite_mask(self) -> None:
        def f(q: T, k: T, v: T, m: T) -> T:
            mask = torch.where(m > 0, 0.0, torch.finfo(torch.float32).min)
            return torch.softmax(q @ k.transpose(-1, -2) * 0.3 + mask, -1) @ v

        text = self.run_on(graph_of(f, Q, Q, Q, (S, S)))
        self.assertRegex(text, r"dicp.attention\(arg2_1, arg1_1, arg3_1, v\d, False, 0.3\)")

    def test_plain_softmax_with_unknown_mask_stays(self) -> None:
        def f(q: T, k: T, v: T, m: T) -> T:
            return torch.softmax(q @ k.transpose(-1, -2) + m, -1) @ v

        self.assertNotIn("dicp", self.run_on(graph_of(f, Q, Q, Q, (S, S))))

    def test_softmax_in_five_calls(self) -> None:
        def f(q: T, k: T, v: T) -> T:
            s = q @ k.transpose(-1, -2)
            e = torch.exp(s - s.amax(-1, keepdim=True))
            return (e / e.sum(-1, keepdim=True)) @ v

        self.assertIn(", None, False, 1.0)", self.run_on(graph_of(f, Q, Q, Q)))

    def test_weights_used_elsewhere_stay(self) -> None:
        def f(q: T, k: T, v: T) -> tuple[T, T]:
            p = torch.softmax(q @ k.transpose(-1, -2), -1)
            return p @ v, p

        self.assertNotIn("dicp", self.run_on(graph_of(f, Q, Q, Q)))

    def test_training_forward_stays(self) -> None:
        q = torch.randn(Q, requires_grad=True)
        g = graphs_of(written_out, q, Q, Q, train=True)["forward"]
        self.assertNotIn("dicp", self.run_on(g))

    def test_unclaimed_stays(self) -> None:
        g = canonicalize(graph_of(written_out, Q, Q, Q))
        text = show(g)
        self.assertEqual(self.run_on(g, claims(lambda n: False)), text)

    def test_one_query(self) -> None:
        g = graph_of(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, 1, H * D),
            (B, H, 1, D),
            Q,
            Q,
        )
        self.assertExpectedInline(self.run_on(g), """\
graph(arg0_1: f32[2,4,1,8], arg1_1: f32[2,4,5,8], arg2_1: f32[2,4,5,8]):
  v0: f32[2,4,1,8] = dicp.attention(arg0_1, arg1_1, arg2_1, None, False, 0.35355339059327373)
  v1: f32[2,1,32] = view(v0, [2,1,32])
  return v1
""")

    def test_symbolic_sizes(self) -> None:
        g = graph_of(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
            (3, H, 6, D),
            (3, H, 7, D),
            (3, H, 7, D),
            dynamic=True,
        )
        text = self.run_on(g)
        self.assertIn("= dicp.attention(", text)
        self.assertNotIn("bmm", text)


SPELLINGS: dict[str, Callable[..., T]] = {
    "eager": lambda q, k, v: torch.softmax((q @ k.transpose(-1, -2) * 0.25).float(), -1).to(q.dtype) @ v,
    "softmax_dtype": lambda q, k, v: F.softmax(q @ k.mT, dim=-1, dtype=torch.float32).to(q.dtype) @ v,
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "scaled_q": lambda q, k, v: torch.softmax((q * 0.2) @ k.mT, -1) @ v,
    "einsum": lambda q, k, v: torch.einsum(
        "bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v
    ),
    "heads_last": lambda q, k, v: F.scaled_dot_product_attention(
        *(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling_is_recognised(spelling: str, dtype: torch.dtype) -> None:
    inputs = [torch.randn(Q).to(dtype) for _ in range(3)]
    g = canonicalize(graph_of(SPELLINGS[spelling], *inputs))
    checker = CheckPass()
    checker.rtol = checker.atol = 1e-5 if dtype == torch.float32 else 2e-2
    text = show(checker.check(rewrite_attention, g, claims()))
    assert "dicp.attention(" in text, text
    assert "bmm" not in text, text

"""rewrite_linears: linear layers of the same few rows become one call, with their norm and gate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from graphs import CheckPass, claims, graph_of
from torch import Tensor

from dicp.ir.printer import show
from dicp.passes.canonicalize import canonicalize
from dicp.passes.rewrite_linear import rewrite_linear
from dicp.passes.rewrite_linears import rewrite_linears

EVERYTHING = claims()
K, N = 8, 4


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """As language models write it."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rewritten(check: Any, fn: Any, *inputs: Any, vendor: Any = EVERYTHING) -> str:
    g = rewrite_linear(canonicalize(graph_of(fn, *inputs)), EVERYTHING)
    return show(canonicalize(check(rewrite_linears, g, vendor)))


class TestText(TestCase, CheckPass):
    maxDiff = None

    def test_norm_and_gate_of_a_language_model(self) -> None:
        def fn(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor) -> Tensor:
            y = rms_norm(x, norm)
            return F.silu(F.linear(y, gate)) * F.linear(y, up)

        self.assertExpectedInline(
            rewritten(self.check, fn, (1, 1, K), (K,), (N, K), (N, K)),
            """\
graph(arg0_1: f32[1,1,8], arg1_1: f32[8], arg2_1: f32[4,8], arg3_1: f32[4,8]):
  v0: (f32[1,1,4]) = dicp.linears(arg0_1, arg1_1, 1e-06, [arg2_1,arg3_1], [], [], silu, True)
  v1: f32[1,1,4] = v0[0]
  return v1
""",
        )

    def test_queries_keys_and_values(self) -> None:
        def fn(x: Tensor, norm: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
            y = rms_norm(x, norm)
            return F.linear(y, q), F.linear(y, k).view(1, 2, 2), F.linear(y, v).cos(), x

        self.assertExpectedInline(
            rewritten(self.check, fn, (1, 1, K), (K,), (2 * N, K), (N, K), (N, K)),
            """\
graph(arg0_1: f32[1,1,8], arg1_1: f32[8], arg2_1: f32[8,8], arg3_1: f32[4,8], arg4_1: f32[4,8]):
  v0: (f32[1,1,8], f32[1,1,4], f32[1,1,4]) = dicp.linears(arg0_1, arg1_1, 1e-06, [arg2_1,arg3_1,arg4_1], [], [], none, False)
  v1: f32[1,1,8] = v0[0]
  v2: f32[1,1,4] = v0[1]
  v3: f32[1,1,4] = v0[2]
  v4: f32[1,2,2] = view(v2, [1,2,2])
  v5: f32[1,1,4] = cos(v3)
  return v1, v4, v5
""",
        )

    def test_a_norm_that_others_read_stays(self) -> None:
        def fn(x: Tensor, norm: Tensor, q: Tensor, k: Tensor) -> Any:
            y = rms_norm(x, norm)
            return F.linear(y, q), F.linear(y, k), y

        self.assertExpectedInline(
            rewritten(self.check, fn, (2, K), (K,), (N, K), (N, K)),
            """\
graph(arg0_1: f32[2,8], arg1_1: f32[8], arg2_1: f32[4,8], arg3_1: f32[4,8]):
  v0: f32[2,8] = pow.Tensor_Scalar(arg0_1, 2)
  v1: f32[2,1] = mean.dim(v0, [-1], True)
  v2: f32[2,1] = add(v1, 1e-06)
  v3: f32[2,1] = rsqrt(v2)
  v4: f32[2,8] = mul(arg0_1, v3)
  v5: f32[2,8] = mul(arg1_1, v4)
  v6: (f32[2,4], f32[2,4]) = dicp.linears(v5, None, 0.0, [arg2_1,arg3_1], [], [], none, False)
  v7: f32[2,4] = v6[0]
  v8: f32[2,4] = v6[1]
  return v7, v8, v5
""",
        )

    def test_layers_that_differ_stay_apart(self) -> None:
        """In activation, or by what is added; a bias is one."""

        def fn(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, bias: Tensor) -> Any:
            first = F.linear(x, a), F.linear(x, b)
            return *first, F.relu(F.linear(x, c)), F.linear(x, d) + x, F.linear(x, e, bias)

        shapes = [(K, K), (N, K), (N, K), (K, K), (N, K), (N,)]
        self.assertExpectedInline(
            rewritten(self.check, fn, (2, K), *shapes),
            """\
graph(arg0_1: f32[2,8], arg1_1: f32[8,8], arg2_1: f32[4,8], arg3_1: f32[4,8], arg4_1: f32[8,8], arg5_1: f32[4,8], arg6_1: f32[4]):
  v0: (f32[2,8], f32[2,4]) = dicp.linears(arg0_1, None, 0.0, [arg1_1,arg2_1], [], [], none, False)
  v1: f32[2,8] = v0[0]
  v2: f32[2,4] = v0[1]
  v3: f32[2,4] = dicp.linear(arg0_1, arg3_1, None, None, relu)
  v4: f32[2,8] = dicp.linear(arg0_1, arg4_1, None, arg0_1, none)
  v5: f32[2,4] = dicp.linear(arg0_1, arg5_1, arg6_1, None, none)
  return v1, v2, v3, v4, v5
""",
        )


class TestChains(CheckPass):
    def test_a_gate_of_a_gate(self) -> None:
        """The second call reads what the first one gave in the first one's stead."""

        def fn(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
            y = torch.tanh(F.linear(x, a)) * F.linear(x, b)
            return torch.tanh(F.linear(y, c)) * F.linear(y, d)

        text = rewritten(self.check, fn, (2, K), (K, K), (K, K), (N, K), (N, K))
        assert text.count("dicp.linears") == 2 and "dicp.linear(" not in text

    @pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
    def test_low_precision(self, cast: torch.dtype) -> None:
        self.rtol = self.atol = 3e-2  # the norm's rounding, that of its weight, and of the layers

        def fn(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor) -> Tensor:
            y = rms_norm(x, norm)
            return F.silu(F.linear(y, gate)) * F.linear(y, up)

        inputs = [torch.randn(s).to(cast) for s in ((3, K), (K,), (N, K), (N, K))]
        text = rewritten(self.check, fn, *inputs)
        assert text.count("dicp.linears") == 1 and "rsqrt" not in text

    def test_torchs_own_norm(self) -> None:
        def fn(x: Tensor, norm: Tensor, q: Tensor, k: Tensor) -> Any:
            y = F.rms_norm(x, (K,), norm, 1e-5)
            return F.linear(y, q), F.linear(y, k)

        for dtype in (torch.float32, torch.bfloat16):
            self.rtol = self.atol = 1e-5 if dtype == torch.float32 else 3e-2
            inputs = [torch.randn(s).to(dtype) for s in ((3, K), (K,), (N, K), (N, K))]
            assert "rsqrt" not in rewritten(self.check, fn, *inputs)

    def test_other_norms_stay(self) -> None:
        """Of statistics over other dims, or of others' elements."""

        def columns(x: Tensor, w: Tensor, q: Tensor, k: Tensor) -> Any:
            y = x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6) * w
            return F.linear(y, q), F.linear(y, k)

        def others(x: Tensor, w: Tensor, q: Tensor, k: Tensor) -> Any:
            y = x * torch.rsqrt(x.cos().pow(2).mean(-1, keepdim=True) + 1e-6) * w
            return F.linear(y, q), F.linear(y, k)

        for fn in (columns, others):
            assert "rsqrt" in rewritten(self.check, fn, (3, K), (K,), (N, K), (N, K))

    @pytest.mark.parametrize(
        "norm",
        [
            lambda x, w: rms_norm(x, w[:1]),  # one factor for all
            lambda x, w: rms_norm(x.to(torch.int32).to(x.dtype), w) + 0,
            lambda x, w: rms_norm(x.bfloat16().to(x.dtype), w),
            lambda x, w: rms_norm(x, w).to(torch.float8_e4m3fn).to(x.dtype),
            lambda x, w: rms_norm(x, w.to(torch.int32).to(x.dtype)),
            lambda x, w: (20 * rms_norm(x, w)).to(torch.int8).to(x.dtype) * w,
        ],
    )
    def test_roundings_and_factors_stay(self, norm: Any) -> None:
        """Casts that a model writes for what they take away, and weights of another length than x."""

        def fn(x: Tensor, w: Tensor, q: Tensor, k: Tensor) -> Any:
            y = norm(x, w)
            return F.linear(y, q), F.linear(y, k)

        rewritten(self.check, fn, (3, K), (K,), (N, K), (N, K))
        for dtype in (torch.bfloat16, torch.float16):
            self.rtol = self.atol = 5e-2
            inputs = [torch.randn(s).to(dtype) for s in ((3, K), (K,), (N, K), (N, K))]
            rewritten(self.check, fn, *inputs)

    def test_rows_of_something_larger(self) -> None:
        """The norm's operand is no view of rows; the norm itself is."""

        def fn(x: Tensor, w: Tensor, q: Tensor, k: Tensor) -> Any:
            y = rms_norm(x[:, -2:], w)
            return F.linear(y, q), F.linear(y, k)

        assert "dicp.linears" in rewritten(self.check, fn, (2, 5, K), (K,), (N, K), (N, K))

    def test_scales_made_between(self) -> None:
        """What is but a view, a cast or a constant comes before the first of the layers as well."""

        def fn(x: Tensor, q: Tensor, k: Tensor, s: Tensor, t: Tensor) -> Any:
            first = F.linear(x, q.to(x.dtype) * s[:, None])
            return first, F.linear(x, k.to(x.dtype) * t[:, None])

        stored = [torch.randint(-100, 100, (N, K), dtype=torch.int8) for _ in range(2)]
        text = rewritten(self.check, fn, torch.randn(3, K), *stored, torch.rand(N), torch.rand(N))
        assert text.count("dicp.linears") == 1 and "scaled_linear" not in text

    def test_the_vendor_decides(self) -> None:
        def fn(x: Tensor, q: Tensor, k: Tensor) -> Any:
            return F.linear(x, q), F.linear(x, k)

        refused = claims(lambda node: node.target is not torch.ops.dicp.linears.default)
        assert "dicp.linears" not in rewritten(self.check, fn, (3, K), (N, K), (N, K), vendor=refused)
        assert "dicp.linears" in rewritten(self.check, fn, (3, K), (N, K), (N, K))

    def test_a_weight_made_between(self) -> None:
        """What comes after the first of the layers cannot be read where they are."""

        def fn(x: Tensor, q: Tensor, k: Tensor) -> Any:
            y = F.linear(x, q)
            return y, F.linear(x, k * y.sum())

        assert "dicp.linears" not in rewritten(self.check, fn, (3, K), (N, K), (N, K))

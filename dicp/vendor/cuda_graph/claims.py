"""What cuda_graph gives to libraries, all by way of aten: cuBLAS, cuDNN, cuFFT, cuSOLVER, the attention
kernels torch ships, CUB's sorts, and torch's generator for random numbers (so that a seed means what it means
under eager).

Products write into planned memory; the others allocate. Interpreted on CPU tensors, the same calls run there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F

from dicp.config import Config
from dicp.schedule.defs import Call
from dicp.vendor.base import Claim
from dicp.vendor.cuda_graph import attention, convolution, grouped, linears, products

aten = torch.ops.aten
ALIGN = 16  # bytes: on an H100, attention in bfloat16 at other addresses came out wrong, in float32 it failed
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# Ops whose results their library allocates, by what serves them.
LIBRARY = {
    "attention": """_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward""",
    "product": "_int_mm _addmm_activation _scaled_mm _grouped_mm",
    "pooling": "max_pool2d_with_indices_backward",
    "sort": "sort topk",
    "selection": "kthvalue median nanmedian mode histc",
    "transform": "_fft_c2c _fft_c2r _fft_r2c",
    "linear algebra": """linalg_cholesky_ex linalg_eig linalg_eigh _linalg_eigh linalg_inv_ex linalg_lu
        linalg_lu_factor_ex linalg_lu_solve linalg_qr _linalg_svd _linalg_det _linalg_slogdet _linalg_solve_ex
        linalg_solve_triangular linalg_lstsq linalg_ldl_factor_ex linalg_ldl_solve linalg_householder_product
        linalg_matrix_exp triangular_solve cholesky_solve cholesky_inverse ormqr geqrf""",
    "generator": """native_dropout bernoulli rand rand_like randn randn_like randint randint_like randperm
    uniform normal
        normal_functional multinomial exponential geometric cauchy log_normal poisson""",
}


def candidates(node: fx.Node, config: Config) -> list[Claim]:
    """The calls that could serve a node, the one to take without measuring first; one under
    numerics="eager"."""
    own = _own().get(node.target)
    if own is not None:
        return own(node, config)
    make = _table().get(node.target)
    claim = make(node) if make is not None else None
    if claim is None:
        return []
    if node.target in _products() or node.target is torch.ops.dicp.linear.default:
        return products.candidates(node, config, claim)
    if node.target in (aten.convolution.default, torch.ops.dicp.conv.default):
        return convolution.candidates(node, config, claim)
    if node.target is aten._grouped_mm.default:
        return grouped.candidates(node, config, claim)
    if node.target in _attentions():
        return attention.candidates(node, config, claim)
    return [claim]


@functools.cache
def _own() -> dict[Any, Callable[[fx.Node, Any], list[Claim]]]:
    """Calls that no library has."""
    from dicp.ops.library import register

    register()
    ops = torch.ops.dicp
    return {ops.linears.default: linears.candidates, ops.scaled_linear.default: products.scaled}


@functools.cache
def _attentions() -> frozenset[Any]:
    """Calls of attention that the template can make too."""
    names = ("_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention_for_cpu")
    return frozenset([torch.ops.dicp.attention.default, *(getattr(aten, n).default for n in names)])


def keeps(op: Any) -> bool:
    """Whether some use of the op is claimed."""
    return op in _table()


def supports(target: Any, node: fx.Node) -> bool:
    """Whether a dicp::* call may be formed. Mostly products do not: the kernel that follows does the rest."""
    if target is torch.ops.dicp.linear.default:
        return products.supports_linear(node)
    if target is torch.ops.dicp.scaled_linear.default:
        return products.supports_scaled(node)
    if target is torch.ops.dicp.linears.default:
        return linears.supports(node)
    if target is torch.ops.dicp.conv.default:
        return convolution.supports(node)
    if target is torch.ops.dicp.attention.default:
        val = node.meta.get("val")
        return isinstance(val, torch.Tensor) and val.dtype in FLOATS
    return False


def _through_aten(name: str, node: fx.Node) -> Claim:
    return Claim(name, lambda w, c: w.extern(c))


def _attention_of_aten(node: fx.Node) -> Claim:
    return Claim("attention", lambda w, c: w.extern(c, at_vectors(c.node.target)))


@functools.cache
def at_vectors(op: Any) -> Callable[..., Any]:
    """The op on tensors that begin at whole vectors, as its kernels take for granted that they do: others are
    copied first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*map(at_vector, args), **{k: at_vector(v) for k, v in kwargs.items()})

    return call


def at_vector(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) and x.is_cuda and x.data_ptr() % ALIGN else x


def _out(name: str, op: Any) -> Claim:
    """A call that writes into planned memory; op: of torch's own namespace, which Python calls fastest."""

    def emit(w: Any, c: Call) -> None:
        args = [w.value(a) for a in c.args] + [f"{k}={w.value(v)}" for k, v in c.kwargs.items()]
        target = w.name(f"{name}_out", op)
        w.line(f"{target}({', '.join(args)}, out={w.into(c.outputs[0])})", c.note)

    return Claim(f"{name}: cuBLAS", emit, out=True, prepare=products.aligned_operands)


@functools.cache
def _products() -> dict[Any, Callable[[fx.Node], Claim]]:
    outs = {
        aten.mm.default: torch.mm,
        aten.addmm.default: torch.addmm,
        aten.bmm.default: torch.bmm,
        aten.baddbmm.default: torch.baddbmm,
    }

    def claim(op: Any) -> Callable[[fx.Node], Claim]:
        return lambda node: _out(op._opname, outs[op])

    return {op: claim(op) for op in outs}


# -- attention -----------------------------------------------------------------------------------------------


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """dicp::attention by the best kernel torch has for it; [B, H, S, D] lying in memory as [B, S, H, D]."""
    q, k, v, mask = map(at_vector, (q, k, v, mask))
    if mask is not None and mask.dtype not in (torch.bool, q.dtype):
        # what is finite stays so: a row that it closes has a mean of v, one that -inf closes is 0
        lowest = torch.finfo(q.dtype).min
        mask = torch.where(mask == -math.inf, mask, mask.clamp(min=lowest)).to(q.dtype)
    if causal and mask is not None:  # torch takes one or the other
        open_ = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        mask = mask & open_ if mask.dtype == torch.bool else mask.masked_fill(~open_, -math.inf)
        causal = False
    if k.shape[1] != q.shape[1] and q.dtype == torch.float32:  # the kernel for these knows no groups
        k, v = (each_head(t, q.shape[1]) for t in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def each_head(t: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, H, S, D] with each head repeated for its group: [B, heads, S, D]."""
    group = heads // t.shape[1]
    return t.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2)


def _attention(node: fx.Node) -> Claim:
    def emit(w: Any, c: Call) -> None:
        args = [w.value(a) for a in (*c.args, *[None] * 6)[:6]]
        args[4] = args[4] if args[4] != "None" else "False"
        w.line(f"result = {w.name('attend', attend)}({', '.join(args)})", c.note)
        w.keep(c, "result")

    return Claim("attention", emit)


@functools.cache
def _table() -> dict[Any, Callable[[fx.Node], Claim | None]]:
    from dicp.ops.library import register

    register()
    table: dict[Any, Callable[[fx.Node], Claim | None]] = {**_products()}
    for served, names in LIBRARY.items():
        for name in names.split():
            packet = getattr(aten, name, None)
            for overload in packet.overloads() if packet is not None else ():
                op = getattr(packet, overload)
                if not op._schema.is_mutable:
                    attention = served == "attention"
                    table[op] = _attention_of_aten if attention else functools.partial(_through_aten, served)
    return table | {
        aten.convolution.default: convolution.library,
        aten.convolution_backward.default: convolution.library,
        torch.ops.dicp.conv.default: convolution.library_of_all,
        torch.ops.dicp.attention.default: _attention,
        torch.ops.dicp.linear.default: products.linear_library,
    }

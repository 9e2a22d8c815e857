"""Which aten ops AOTAutograd takes apart before we see them, and into what.

The set is torch's own core decompositions, plus the few of EXTRA and dicp's own, minus what the vendor keeps,
minus (for a kernel vendor) what the op table lowers directly, minus the random ops, whose numbers are eager's
only when they are drawn whole. torch's tables are read, never changed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from dicp import compat
from dicp.ops import encoder, foreach, quantized
from dicp.ops.table import table

Decomposition = Callable[..., Any]

# Registered in torch, outside its core set: taken apart here because the parts fuse.
EXTRA = """addmv lift lift_fresh native_batch_norm _native_batch_norm_legit _batch_norm_with_update
    _batch_norm_with_update_functional _batch_norm_no_update batch_norm_backward
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_trilinear3d upsample_nearest1d
    upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa rrelu_with_noise_backward
    ldexp dist meshgrid tril_indices triu_indices narrow_copy unbind_copy pairwise_distance pdist selu
    prelu relu6 var std var_mean std_mean special_ndtr special_erfcx view_copy permute_copy""".split()


# Rows without a rule that are made of others: taken apart for a vendor that does not keep them.
OPENED = frozenset("addmm baddbmm _addmm_activation _int_mm".split())

PRODUCTS = "mm bmm addmm baddbmm".split()

# Parts here, and in eager one call, whose bits the parts do not have: BLAS's of vectors, a whole layer.
ONE_CALL = frozenset("mv dot vdot _transformer_encoder_layer_fwd".split())


def decomposition_table(
    keeps: Callable[[OpOverload], bool] = lambda op: False, kernels: bool = True, exact: bool = False
) -> dict[OpOverload, Decomposition]:
    """The decompositions to hand to AOTAutograd.

    keeps: ops that the vendor takes whole. kernels: whether an op with a row of the op table stays whole,
    since it becomes kernels, or a library or extern call. exact: those of ONE_CALL stay whole, as in
    eager.
    """
    late = loaded_later()
    wanted = _of_all_processes(kernels, exact) | _chosen(late, late, kernels, exact)
    out = {op: fn for op, fn in wanted.items() if not keeps(op)}
    return out | _of_some_uses(out) if kernels else out


@functools.cache
def _of_all_processes(kernels: bool, exact: bool) -> dict[OpOverload, Decomposition]:
    """Those that no import adds to. Chosen once: to walk through torch's whole table takes 10 ms and
    more."""
    own = own_decompositions()
    core = compat.core_decompositions() | set(own)
    return _chosen(compat.torch_decompositions() | own, core, kernels, exact)


def _chosen(
    found: Mapping[Any, Decomposition], core: Container[object], kernels: bool, exact: bool
) -> dict[OpOverload, Decomposition]:
    """Those that serve a vendor which keeps nothing. core: ops to take apart unless kernels make them."""
    rows = table()
    out: dict[OpOverload, Decomposition] = {}
    for op, fn in found.items():
        if not isinstance(op, OpOverload) or exact and op._opname in ONE_CALL:
            continue
        row = rows.get(op)
        if row is None:
            wanted = op in core or op._opname in EXTRA
        elif row.rule is None:
            wanted = op._opname in OPENED
        else:
            wanted = not kernels and op in core
        if wanted:
            out[op] = unshared(op, fn)
    return out


def _of_some_uses(out: dict[OpOverload, Decomposition]) -> dict[OpOverload, Decomposition]:
    """Of rows: they give NotImplemented for all other uses, which stay whole."""
    aten = torch.ops.aten
    products = [getattr(aten, name).default for name in PRODUCTS]
    return {
        aten._embedding_bag.default: embedding_bag,
        **{median: of_elements_apart(median) for median in (aten.median.dim, aten.nanmedian.dim)},
        **{product: split_product(out.get(product)) for product in products},
    }


def own_decompositions() -> dict[OpOverload, Decomposition]:
    """Ops that torch does not take apart, or not as exactly as eager computes them."""
    aten = torch.ops.aten
    return {
        aten._int_mm.default: quantized.int_mm,
        aten.addbmm.default: addbmm,
        aten.channel_shuffle.default: channel_shuffle,
        aten.grid_sampler_2d.default: grid_sampler,
        aten.masked_scatter.default: masked_scatter,
        aten.soft_margin_loss_backward.default: soft_margin_loss_backward,
        aten._transformer_encoder_layer_fwd.default: encoder.encoder_layer,
        aten._weight_norm_interface_backward.default: weight_norm_backward,
        **{op: shuffled(op) for op in (aten.pixel_shuffle.default, aten.pixel_unshuffle.default)},
        **foreach.decompositions(),
    }


def loaded_later() -> dict[OpOverload, Decomposition]:
    """Of ops that this process has if an import has defined them, at whatever time."""
    out: dict[OpOverload, Decomposition] = dict(quantized.decompositions())
    if hasattr(torch.ops.prims, "fma"):  # Inductor's, which Dynamo loads where it writes one
        out[torch.ops.prims.fma.default] = lambda a, b, c: a * b + c
    return out


def unshared(op: OpOverload, fn: Decomposition) -> Decomposition:
    """The same, for an op whose results are new tensors: where its parts are views, and copies of what lies
    as it is asked to, they give the operand itself, which a write to the result then changes."""
    if any(r.alias_info is not None for r in op._schema.returns):
        return fn

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        operands = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]

        def own(t: torch.Tensor) -> torch.Tensor:
            return t.clone() if any(compat.shares_memory(t, a) for a in operands) else t

        return tree_map_only(torch.Tensor, own, fn(*args, **kwargs))

    return decomposed


def shuffled(op: OpOverload) -> Decomposition:
    """torch's, which keeps the order of channels-last images: only the CPU's kernels do."""

    def decomposed(x: Any, factor: int) -> Any:
        y: Any = compat.torch_decompositions()[op](x, factor)
        return y if x.device.type == "cpu" else y.contiguous()

    return decomposed


def channel_shuffle(x: Any, groups: int) -> Any:
    """torch's, as eager's kernel for the CPU lays it out: it keeps the order of channels-last images."""
    y: Any = compat.torch_decompositions()[torch.ops.aten.channel_shuffle.default](x, groups)
    return y.contiguous(memory_format=compat.memory_format(x)) if x.device.type == "cpu" else y


def of_elements_apart(op: OpOverload) -> Decomposition:
    """The op on a dense copy where elements of its operand share a place: torch's kernel, which selects in
    place, gives whatever memory held there, in eager too."""

    def decomposed(x: Any, dim: int, keepdim: bool = False) -> Any:
        if not any(isinstance(s, int) and s == 0 and n != 1 for s, n in zip(x.stride(), x.shape)):
            return NotImplemented
        return op(x.clone(memory_format=torch.contiguous_format), dim, keepdim)

    return decomposed


def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Sums of bags in bfloat16, with the second result, each index's bag, which torch's kernel leaves out and
    fake tensors have. (Nobody reads the fourth, of which they do not agree either.)"""
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or mode != 0 or padding_idx >= 0:
        return NotImplemented
    how = scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx
    call = torch.ops.aten._embedding_bag_forward_only.default
    out, _, sizes, _ = call(weight, indices, offsets, *how)
    bags = torch.searchsorted(offsets, torch.ones_like(indices).cumsum(0).to(offsets.dtype)) - 1
    return out, bags.to(offsets.dtype), sizes, offsets.new_zeros(out.shape[0])


def split_product(otherwise: Decomposition | None) -> Decomposition:
    """A matrix product of operands without elements, on which libraries differ, and one of integers or with
    factors made of sizes, or not finite, that is added to something, for which they have no call; all others
    as `otherwise`."""

    def decomposed(*args: Any, beta: Any = 1, alpha: Any = 1) -> Any:
        a, b = args[-2:]
        alpha, beta = _factors(a, alpha, beta)
        if any(isinstance(n, int) and n == 0 for t in (a, b) for n in t.shape):
            zeros = a.new_zeros((*a.shape[:-1], b.shape[-1]))
            return zeros if len(args) == 2 or beta == 0 else zeros + args[0] * beta
        plain = (a.is_floating_point() or a.is_complex()) and _is_plain(alpha) and _is_plain(beta)
        if len(args) == 3 and not plain:
            product = (a @ b) * alpha
            return product if beta == 0 else product + args[0] * beta
        if otherwise is None:
            return NotImplemented
        return otherwise(*args) if len(args) == 2 else otherwise(*args, beta=beta, alpha=alpha)

    return decomposed


def _is_plain(factor: Any) -> bool:
    return not isinstance(factor, (torch.SymInt, torch.SymFloat)) and math.isfinite(abs(factor))


def _factors(a: Any, *factors: Any) -> tuple[Any, ...]:
    """Factors of a product of `a`: of integers, eager takes their whole part."""
    return factors if a.is_floating_point() or a.is_complex() else tuple(int(f) for f in factors)


def addbmm(x: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta * x + alpha * (sum over the batch of batch1 @ batch2)."""
    alpha, beta = _factors(batch1, alpha, beta)
    product = torch.bmm(batch1, batch2).sum(0, dtype=batch1.dtype)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (x if beta == 1 else x * beta)


def grid_sampler(x: Any, grid: Any, mode: int, padding: int, align_corners: bool) -> Any:
    """For vendors without kernels, which have rules/sampling.py: torch's, which loses what eager makes of NaN
    in a grid, of border and reflection (padding 1, 2) the first pixel, in bilinear sums (mode 0) NaN."""
    sample = compat.torch_decompositions()[torch.ops.aten.grid_sampler_2d.default]
    if padding != 0 and mode != 2:
        grid = torch.where(grid.isnan(), -1, grid)
    out = sample(x, grid, mode, padding, align_corners)
    return torch.where(grid.isnan().any(-1)[:, None], math.nan, out) if padding == mode == 0 else out


def masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    """The k-th masked position gets the k-th element of source: a gather at the running count of the mask."""
    mask, x = torch.broadcast_tensors(mask, x)
    place = (mask.reshape(-1).cumsum(0) - 1).reshape(mask.shape)
    # read where mask holds alone: source may have no element
    picked = torch.ops.aten._unsafe_masked_index.default(source.reshape(-1), mask, [place], 0)
    return torch.where(mask, picked, x).contiguous()


def soft_margin_loss_backward(grad: Any, x: Any, target: Any, reduction: int = 1) -> Any:
    """-target * sigmoid(-target * x), where torch's sigmoid - 1 leaves no digits of a small loss."""
    wide = torch.promote_types(x.dtype, torch.float32)
    grad, wide_x, wide_target = grad.to(wide), x.to(wide), target.to(wide)
    out = -wide_target * torch.sigmoid(-wide_target * wide_x) * grad
    return (out / x.numel() if reduction == 1 else out).to(x.dtype)


def weight_norm_backward(grad: Any, v: Any, g: Any, norms: Any, dim: int) -> tuple[Any, Any]:
    """Of w = v g / |v|, the norms over all dimensions but one: gradients of v and g."""
    wide = torch.promote_types(v.dtype, torch.float32)
    wide_grad, wide_v, wide_norms = grad.to(wide), v.to(wide), norms.to(wide)
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    along = (wide_grad * wide_v).sum(others, keepdim=True) / wide_norms
    scale = g.to(wide) / wide_norms
    return (scale * (wide_grad - wide_v * (along / wide_norms))).to(v.dtype), along.to(g.dtype)

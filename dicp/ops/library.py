"""The dicp::* operators: what a chain of aten operators means as one library call.

Each has a fake implementation (shape, dtype, stride) and a reference in plain PyTorch, so that a rewritten
graph still runs in eager PyTorch. They are functional, and used after autograd: they have no derivative.

    linear     y = act(x @ w.T + b) + other          other: [..., N], added after the activation
    scaled_linear  y = act(x @ w.T * scale + b) + other   w: of eight bits
    group_scaled_linear  y = x @ ((w - zero) * scale).T   w: int8, uint8; scale, zero: of groups of depth
    linears    y, ... = act(n(x) @ w.T * scale + b), ...  n: x, or its RMS norm; gated: one y, of two w
    conv       y = act(conv(x, w, b) + other)        other: y's shape, added before the activation
    separable  y = conv(act2(conv(act1(conv(x, w1, b1)), w2, b2)), w3, b3) + other    any, depthwise, 1x1
    attention  y = softmax(scale * q @ k.T + mask) @ v
    add_rows   y = x, with rows added at indices     low precision: each row of y is rounded once
    pack       y = w, in a form that a vendor's library computes with; only the vendor knows what it is
    rng_state, swap_rng_state    the state of torch's generator, and that with another put in its place
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dicp.ir.expr import FLOAT8

NARROW_WEIGHTS = (torch.int8, *FLOAT8)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "relu6": F.relu6,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}

_SCHEMAS = (
    "linear(Tensor x, Tensor w, Tensor? b, Tensor? other, str act='none') -> Tensor",
    "scaled_linear(Tensor x, Tensor w, Tensor? scale, Tensor? b, Tensor? other, str act='none') -> Tensor",
    "group_scaled_linear(Tensor x, Tensor w, Tensor scale, Tensor? zero) -> Tensor",
    "linears(Tensor x, Tensor? norm, float eps, Tensor[] w, Tensor[] scale, Tensor[] b, str act, bool gated) "
    "-> Tensor[]",
    "conv(Tensor x, Tensor w, Tensor? b, Tensor? other, int[] stride, int[] padding, int[] dilation, "
    "int groups, str act) -> Tensor",
    "separable(Tensor x, Tensor w1, Tensor? b1, Tensor? other, Tensor w2, Tensor? b2, Tensor w3, "
    "Tensor? b3, int[] stride1, int[] padding1, int[] stride2, int[] padding2, str act1, str act2) -> Tensor",
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float? scale) -> Tensor",
    "add_rows(Tensor x, Tensor rows, Tensor indices, SymInt padding) -> Tensor",
    "pack(Tensor w, str form) -> Tensor",
)
_RANDOM_SCHEMAS = (
    "rng_state(Device device) -> Tensor",
    "swap_rng_state(Tensor state, Device device) -> Tensor",
)
"""They keep their order among calls that draw."""


@functools.cache
def register() -> torch.library.Library:
    """Define the operators in torch's registry; the first call does it, later ones do nothing."""
    library = torch.library.Library("dicp", "FRAGMENT")
    implementations = {
        "linear": (linear, _linear_fake),
        "scaled_linear": (scaled_linear, _scaled_linear_fake),
        "group_scaled_linear": (group_scaled_linear, lambda x, w, *_: _linear_fake(x, w, None, None)),
        "linears": (linears, _linears_fake),
        "conv": (conv, _conv_fake),
        "separable": (separable, _separable_fake),
        "attention": (attention, _attention_fake),
        "add_rows": (add_rows, _add_rows_fake),
        "pack": (pack, pack),
        "rng_state": (rng_state, _rng_state_fake),
        "swap_rng_state": (swap_rng_state, lambda state, device: torch.empty_like(state)),
    }
    for schema in (*_SCHEMAS, *_RANDOM_SCHEMAS):
        name = schema.partition("(")[0]
        random = (torch.Tag.nondeterministic_seeded,) if schema in _RANDOM_SCHEMAS else ()
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *random))
        reference, fake = implementations[name]
        library.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"dicp::{name}", fake, lib=library)
    return library


def linear(x: Tensor, w: Tensor, b: Tensor | None, other: Tensor | None, act: str = "none") -> Tensor:
    """act(x @ w.T + b) + other.  x: [..., K], w: [N, K], b: [N], other: [..., N]; contiguous."""
    y = ACTIVATIONS[act](F.linear(x, w, b))
    y = y if other is None else y + other
    return y.contiguous()


def _linear_fake(x: Tensor, w: Tensor, b: Tensor | None, other: Tensor | None, act: str = "none") -> Tensor:
    _check_act("linear", act)
    return x.new_empty([*x.shape[:-1], w.shape[0]])


def scaled_linear(
    x: Tensor, w: Tensor, scale: Tensor | None, b: Tensor | None, other: Tensor | None, act: str = "none"
) -> Tensor:
    """act(x @ w.T * scale + b) + other.  w: [N, K] of NARROW_WEIGHTS, scale: [N] or
    one element; else as linear."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(compute) @ w.to(compute).t()
    y = y if scale is None else y * scale.to(compute)
    y = ACTIVATIONS[act](y if b is None else y + b.to(compute))
    return (y if other is None else y + other.to(compute)).to(x.dtype)


def _scaled_linear_fake(
    x: Tensor, w: Tensor, scale: Tensor | None, b: Tensor | None, other: Tensor | None, act: str = "none"
) -> Tensor:
    return _linear_fake(x, w, b, other, act)


def group_scaled_linear(x: Tensor, w: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """x @ ((w - zero) * scale).T.  x: [M, K], w: [N, K] of int8 or uint8; scale and zero: [N, G], each number
    for K / G of w's row, one after the other. zero: of a float dtype or w's."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    groups = w.to(compute).unflatten(1, (scale.shape[1], -1))
    groups = groups if zero is None else groups - zero.to(compute).unsqueeze(-1)
    return (x.to(compute) @ (groups * scale.to(compute).unsqueeze(-1)).flatten(1).t()).to(x.dtype)


def linears(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    w: list[Tensor],
    scale: list[Tensor],
    b: list[Tensor],
    act: str,
    gated: bool,
) -> list[Tensor]:
    """Linear layers of one x: [act(n(x) @ w.T * scale + b), ...]; gated, of two, the first times the second,
    which has no activation.

    x: [..., K], w: each [N, K], of x's dtype or of NARROW_WEIGHTS, scale: none, or one for each w, of [N] or
    [], b: none, or one of [N] for each; results [..., N], contiguous.
    n: x, or where `norm` is given, [K], x * rsqrt(mean(x * x) + eps) * norm, the statistics in float32
    (float64 of float64).
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x
    if norm is not None:
        wide = x.to(compute)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        rows = (wide.to(x.dtype) * norm).to(x.dtype)

    def layer(i: int, act: str) -> Tensor:
        if w[i].dtype != x.dtype or scale:
            return scaled_linear(rows, w[i], scale[i] if scale else None, b[i] if b else None, None, act)
        return linear(rows, w[i], b[i] if b else None, None, act)

    return [layer(0, act) * layer(1, "none")] if gated else [layer(i, act) for i in range(len(w))]


def _linears_fake(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    w: list[Tensor],
    scale: list[Tensor],
    b: list[Tensor],
    act: str,
    gated: bool,
) -> list[Tensor]:
    _check_act("linears", act)
    return [x.new_empty([*x.shape[:-1], each.shape[0]]) for each in (w[:1] if gated else w)]


def conv(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    other: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    act: str,
) -> Tensor:
    """act(conv(x, w, b) + other).  x: [B, C, *in], w: [N, C/groups, *window], b: [N] of x's dtype, or float32
    where there is no `other`, result [B, N, *out].

    The strides are those of aten.convolution: channels-last where x or w is, else contiguous.
    """
    if b is not None and b.dtype != x.dtype:
        wide = _convolution(x.to(b.dtype), w.to(b.dtype), b, stride, padding, dilation, groups)
        y = wide.to(x.dtype)
    else:
        y = _convolution(x, w, b, stride, padding, dilation, groups)
    # In place: the sum keeps y's strides whatever those of `other`.
    y = y if other is None else y.add_(other)
    return ACTIVATIONS[act](y)


def _conv_fake(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    other: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    act: str,
) -> Tensor:
    _check_act("conv", act)
    return _convolution(x, w, None, stride, padding, dilation, groups)


def _convolution(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    no_output_padding = [0] * len(stride)
    return torch.ops.aten.convolution.default(
        x, w, b, stride, padding, dilation, False, no_output_padding, groups
    )


def separable(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    other: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    w3: Tensor,
    b3: Tensor | None,
    stride1: list[int],
    padding1: list[int],
    stride2: list[int],
    padding2: list[int],
    act1: str,
    act2: str,
) -> Tensor:
    """conv3(act2(conv2(act1(conv1(x))))) + other, where each convolution's result is of x's dtype.

    x: [B, C, H, W]; w1: [N, C, *window], w2: [N, 1, *window], of a convolution of each channel for itself,
    w3: [M, N, 1, 1]; b1, b2: [N], b3: [M], of x's dtype or float32; stride1, padding1, stride2, padding2: of
    the first two; other: of the result's shape, [B, M, *out]. Strides are those of conv.
    """
    y = conv(x, w1, b1, None, stride1, padding1, [1, 1], 1, act1)
    y = conv(y, w2, b2, None, stride2, padding2, [1, 1], w2.shape[0], act2)
    y = conv(y, w3, b3, None, [1, 1], [0, 0], [1, 1], 1, "none")
    return y if other is None else y.add_(other)


def _separable_fake(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    other: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    w3: Tensor,
    b3: Tensor | None,
    stride1: list[int],
    padding1: list[int],
    stride2: list[int],
    padding2: list[int],
    act1: str,
    act2: str,
) -> Tensor:
    for act in (act1, act2):
        _check_act("separable", act)
    y = _convolution(x, w1, None, stride1, padding1, [1, 1], 1)
    y = _convolution(y, w2, None, stride2, padding2, [1, 1], w2.shape[0])
    return _convolution(y, w3, None, [1, 1], [0, 0], [1, 1], 1)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """softmax(scale * q @ k.T + mask) @ v.  q: [B, H, Sq, D], k: [B, Hkv, Sk, D], v: [B, Hkv, Sk, Dv].

    Hkv divides H: head h reads key head h // (H / Hkv). mask: broadcasts to [B, H, Sq, Sk]; bool (True takes
    part) or added. causal: row i sees columns j <= i, counted from the upper left. scale: None is 1/sqrt(D).
    A row that mask or causal closes entirely gives zeros, as F.scaled_dot_product_attention does.
    Result [B, H, Sq, Dv] lying in memory as [B, Sq, H, Dv]: the form library calls give, and the one whose
    heads merge back into [B, Sq, H*Dv] without a copy.
    """
    repeat = q.shape[1] // k.shape[1]
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys = k.to(compute).repeat_interleave(repeat, dim=1)
    values = v.to(compute).repeat_interleave(repeat, dim=1)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = (q.to(compute) @ keys.transpose(-1, -2)) * factor
    if causal:
        closed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(closed, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, dim=-1)
    if causal or mask is not None:
        weights = weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    result = (weights @ values).to(q.dtype)
    return result.transpose(1, 2).contiguous().transpose(1, 2)


def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    batch, heads, rows, _ = q.shape
    return q.new_empty([batch, rows, heads, v.shape[-1]]).transpose(1, 2)


def add_rows(x: Tensor, rows: Tensor, indices: Tensor, padding: int) -> Tensor:
    """x, with each of rows added at its index; those at the index `padding` are left out (-1: none is).

    x: [N, C], rows: [*indices.shape, C] of x's dtype, indices: of integers from 0 to N - 1. Contiguous.
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    counted = torch.where((indices == padding).unsqueeze(-1), 0.0, rows.to(compute))
    y = x.to(compute).index_put((indices,), counted, accumulate=True)
    return y.to(x.dtype).contiguous()


def _add_rows_fake(x: Tensor, rows: Tensor, indices: Tensor, padding: int) -> Tensor:
    return x.new_empty(x.shape)


def pack(w: Tensor, form: str) -> Tensor:
    """The weight itself, contiguous: a form changes where its elements lie, not what they are."""
    return w.clone(memory_format=torch.contiguous_format)


def rng_state(device: torch.device) -> Tensor:
    """What torch's generator of the device would draw from next: bytes, on the CPU."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)  # type: ignore[no-any-return]


def _rng_state_fake(device: torch.device) -> Tensor:
    size = torch.Generator(device).get_state().numel()
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def swap_rng_state(state: Tensor, device: torch.device) -> Tensor:
    """The generator's state, after which it has the one given."""
    before = rng_state(device)
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state.cpu(), device)
    return before


def _check_act(op: str, act: str) -> None:
    if act not in ACTIVATIONS:
        raise ValueError(f"dicp::{op}: act is one of {', '.join(ACTIVATIONS)}; got {act!r}")

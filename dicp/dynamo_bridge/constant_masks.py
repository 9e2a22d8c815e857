"""Masks of attention that a model makes of constants alone.

Language models that give scaled_dot_product_attention `is_causal=True` in eager make a mask under
torch.compile: they cannot branch on data there. It is of positions that the trace knows, yet torch chooses
another attention for it, which computes what the mask closes, and on GPUs one without flash. Here such masks
are computed, once, and those that close nothing, or what is above the diagonal, become what eager is given.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from dicp import compat
from dicp.ir.printer import user_location

log = logging.getLogger("dicp")

LARGEST = 1 << 26
"""Elements of a mask, and of what it is made of, up to which it is computed."""

_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
# What gives the same at each call and has no effect; shapes and dtypes are those of the trace.
_PURE = frozenset(
    """arange ones zeros full eye tril triu ones_like zeros_like full_like new_ones new_zeros new_full
    add sub mul neg floordiv mod eq ne le lt ge gt and and_ or or_ xor invert
    logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor
    where masked_fill diff cumsum flip cat stack minimum maximum clamp abs
    getitem view reshape expand expand_as unsqueeze squeeze transpose permute flatten t repeat contiguous
    clone to bool int long float""".split()
)


def fold_masks(gm: fx.GraphModule) -> None:
    """Replace, in Dynamo's graph, masks that are made of constants and that `is_causal` or no mask at all
    stands for, in checkpointed parts as well. What made them is left, without users."""
    _fold(gm, {}, {})


Kinds = dict[fx.Node, str | None]
Outer = dict[fx.Node, fx.Node]
"""What the placeholders of a checkpointed part stand for."""


def _fold(gm: fx.GraphModule, outer: Outer, kinds: Kinds) -> None:
    changed = False
    for node in gm.graph.nodes:
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            _fold_part(gm, node, outer, kinds)
        if node.op != "call_function" or node.target is not _ATTENTION:
            continue
        given = dict(zip(_PARAMETERS, node.args)) | node.kwargs
        mask = given.get("attn_mask")
        if not isinstance(mask, fx.Node) or given.get("is_causal", False) is not False:
            continue
        mask = outer.get(mask, mask)
        if mask not in kinds:
            kinds[mask] = _kind(mask, outer)
        kind = kinds[mask]
        if kind is None or (kind == "causal" and not _square(given["query"], given["key"], mask)):
            continue
        plain = {name: value for name, value in given.items() if name not in ("attn_mask", "is_causal")}
        node.args = tuple(plain.pop(name) for name in _PARAMETERS[:3])
        node.kwargs = plain | {"is_causal": kind == "causal"}
        log.info("attention's mask is made of constants: %s (%s)", kind, user_location(node) or node)
        changed = True
    if changed:
        gm.recompile()


def _fold_part(gm: fx.GraphModule, call: fx.Node, outer: Outer, kinds: Kinds) -> None:
    """The same in a part of the graph that is computed again in the backward, if it is called once."""
    body, *operands = call.args
    if not isinstance(body, fx.Node) or body.op != "get_attr":
        return
    part = getattr(gm, str(body.target))
    calls = sum(len(n.users) for n in gm.graph.nodes if n.op == "get_attr" and n.target == body.target)
    inputs = [n for n in part.graph.nodes if n.op == "placeholder"]
    if calls == 1 and len(inputs) == len(operands):
        pairs = [(p, o) for p, o in zip(inputs, operands) if isinstance(o, fx.Node) and not _is_written(p)]
        _fold(part, outer | {p: outer.get(o, o) for p, o in pairs}, kinds)


def _is_written(node: fx.Node) -> bool:
    """Whether the trace writes to a tensor, in place or through a view."""
    value = node.meta.get("example_value")
    return not isinstance(value, Tensor) or value._version != 0


def _square(query: Any, key: Any, mask: fx.Node) -> bool:
    """Whether rows, columns and the mask are of one size: then torch's and the mask's diagonals are one."""
    q, k, m = (n.meta.get("example_value") for n in (query, key, mask))
    if not isinstance(q, Tensor) or not isinstance(k, Tensor) or not isinstance(m, Tensor):
        return False
    sizes = (q.shape[-2], k.shape[-2], *m.shape[-2:])
    return all(isinstance(n, int) and n == sizes[0] for n in sizes)


def _kind(mask: fx.Node, outer: Outer) -> str | None:
    """"open", "causal", or None for other masks and those that are not made of constants alone."""
    if not _is_constant(mask, outer):
        return None
    try:
        with compat.real_tensors(), torch.device("cpu"):
            return kind_of(_computed(mask, outer, {}))
    except (RuntimeError, TypeError, ValueError, IndexError) as e:
        log.debug("a mask of constants was not computed: %s", e)
        return None


def _is_constant(mask: fx.Node, outer: Outer) -> bool:
    """Whether no call that it is made of reads an input, may have another result the next time or is large,
    and nothing writes to what one of them made."""
    found, stack = {mask}, [mask]
    while stack:
        node = stack.pop()
        if not _is_pure(node) or _is_written(node):
            return False
        value = node.meta["example_value"]
        sizes, strides = tuple(value.shape), value.stride()
        if not all(isinstance(n, int) for n in (*sizes, *strides)):
            return False
        if math.prod(n for n, stride in zip(sizes, strides, strict=True) if stride) > LARGEST:
            return False
        new = {outer.get(n, n) for n in node.all_input_nodes} - found
        found |= new
        stack += new
    return True


def _is_pure(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or "out" in node.kwargs:
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    module = getattr(node.target, "__module__", None) or "torch"  # of builtins that torch has: None
    if name.startswith("__") and name.endswith("__"):  # torch 2.11 calls `==` so
        name = name[2:-2]
    return name in _PURE and module.partition(".")[0] in ("torch", "_operator", "builtins")


def _computed(node: fx.Node, outer: Outer, values: dict[fx.Node, Any]) -> Any:
    """The value of a call, on the CPU whatever the device."""

    def given(a: Any) -> Any:
        if isinstance(a, fx.Node):
            return _computed(outer.get(a, a), outer, values)
        if isinstance(a, torch.device) or (isinstance(a, str) and _is_device(a)):
            return torch.device("cpu")
        return a

    if node not in values:
        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), given)  # type: ignore[misc]
        if node.op == "call_method":
            values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values[node]


def _is_device(text: str) -> bool:
    return text.partition(":")[0] in ("cpu", "cuda", "meta")


def kind_of(mask: Tensor) -> str | None:
    """"open" for a mask that closes nothing, "causal" for one that closes what is above the diagonal. mask:
    booleans that are true where it is open, or numbers to add."""
    shape, mask = mask.shape, _distinct(mask)
    if mask.dtype == torch.bool:
        open_, closed = mask, ~mask
    elif mask.dtype.is_floating_point:
        open_, closed = mask == 0, mask <= torch.finfo(mask.dtype).min
    else:
        return None
    if open_.all():
        return "open"
    if shape[-1:] != shape[-2:-1] or mask.shape[-2:] != shape[-2:]:
        return None
    lower = torch.ones(shape[-2:], dtype=torch.bool).tril()
    return "causal" if bool((open_ == lower).all() and (closed == ~lower).all()) else None


def _distinct(t: Tensor) -> Tensor:
    """Without what a view repeats."""
    for d, stride in enumerate(t.stride()):
        t = t.narrow(d, 0, 1) if stride == 0 and t.shape[d] > 1 else t
    return t


__all__ = ["fold_masks", "kind_of"]

"""Compiling before the first request: `dicp.precompile`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from dicp import compat

Shape = Sequence[int]


def precompile(
    model: Callable[..., Any],
    example_inputs: Sequence[Any] | Mapping[str, Any],
    sizes: Sequence[Shape | Sequence[Shape]] | None = None,
    *,
    backend: Any = "dicp",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile `model` for these sizes now, and return it compiled: later calls with them compile nothing.

    example_inputs: the arguments, as a sequence, or as a mapping of keyword arguments.
    sizes: for each wanted size the shapes of the tensors among the arguments, in their order (with one
    tensor, its shape alone); None: the example's own. Dimensions that differ between sizes are symbolic from
    the start, so most lists take one compile (sizes 0 and 1 take their own). Contents are the example's,
    repeated or cut.

    The model runs once per size, under the grad mode of the caller; results that need gradients run the
    backward too. Random state, buffers and gradients are put back. Call it at the start of each process: what
    an earlier one compiled is only loaded. Raises TypeError where the arguments are a bare tensor, and
    ValueError for sizes that are none, or do not fit the arguments.
    """
    if isinstance(example_inputs, torch.Tensor):
        raise TypeError("example_inputs is a tensor: give the arguments as a sequence, (x,)")
    named = isinstance(example_inputs, Mapping)
    flat, spec = tree_flatten(dict(example_inputs) if named else tuple(example_inputs))
    variants = [flat] if sizes is None else _variants(flat, sizes)
    compiled: Callable[..., Any] = torch.compile(model, backend=backend, mode=mode, options=options)
    with _undisturbed(model):
        for values in variants:
            given = tree_unflatten(values, spec)
            _run(compiled(**given) if named else compiled(*given))
    return compiled


def _variants(flat: list[Any], sizes: Sequence[Any]) -> list[list[Any]]:
    """The flat arguments for each size, varying dimensions marked."""
    places = [k for k, x in enumerate(flat) if isinstance(x, torch.Tensor)]
    if not sizes or not all(isinstance(size, (tuple, list)) for size in sizes):
        raise ValueError(f"sizes: {sizes!r} is no list of shapes, as [(1, 128), (8, 512)] is")
    listed = [_shapes(size, [flat[k] for k in places]) for size in sizes]
    variants = []
    for shapes in listed:
        values = list(flat)
        for n, k in enumerate(places):
            values[k] = _resized(flat[k], shapes[n])
            for d, size in enumerate(shapes[n]):
                if any(other[n][d] != size for other in listed):
                    compat.maybe_mark_dynamic(values[k], d)
        variants.append(values)
    return variants


def _shapes(size: Any, tensors: list[torch.Tensor]) -> list[tuple[int, ...]]:
    given = [size] if len(tensors) == 1 and all(isinstance(n, int) for n in size) else list(size)
    shapes = [tuple(shape) for shape in given]
    if [len(s) for s in shapes] != [t.dim() for t in tensors]:
        have = [tuple(t.shape) for t in tensors]
        raise ValueError(f"sizes: {size} does not fit arguments of shapes {have}")
    return shapes


def _resized(t: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of that shape, with t's elements repeated or cut along each dimension."""
    out = t.detach()
    for d, size in enumerate(shape):
        old = out.shape[d]
        if old == 0 and size:
            out = out.new_zeros([*out.shape[:d], size, *out.shape[d + 1 :]])
        else:
            out = out.index_select(d, torch.arange(size, device=out.device) % max(old, 1))
    return out.clone().requires_grad_(t.requires_grad)


def _run(results: Any) -> None:
    leaves = [t for t in tree_flatten(results)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    if leaves:
        torch.autograd.backward(leaves, [torch.ones_like(t) for t in leaves])


@contextlib.contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """Buffers, gradients and random state afterwards as they were."""
    module = model if isinstance(model, torch.nn.Module) else torch.nn.Module()
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    gradients = {name: p.grad for name, p in module.named_parameters()}
    devices = {p.device.index for p in module.parameters() if p.device.type == "cuda"}
    for p in module.parameters():
        p.grad = None
    try:
        with torch.random.fork_rng(devices=sorted(d or 0 for d in devices)):
            yield
    finally:
        with torch.no_grad():
            for name, b in module.named_buffers():
                if name in buffers and buffers[name].shape == b.shape:
                    b.copy_(buffers[name])
        for name, p in module.named_parameters():
            p.grad = gradients.get(name)


__all__ = ["precompile"]

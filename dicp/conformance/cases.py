"""Cases: one call of one operator on given tensors, in every layout and with every kind of value the suite
knows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from . import opdb, tolerance
from .refused import refused

Mode = Literal["forward", "gradient"]


@dataclass(frozen=True)
class Slot:
    """The place of tensor number `index` in a call's arguments."""

    index: int


@dataclass(frozen=True)
class Case:
    """A call with its tensors taken out.

    id: `s3` sample 3 of the database, `s3:transposed` the same in another layout, `special0` a value case...
    resized: the same tensors with other sizes, for a second call of a dynamic compilation; None where there
    are none. refused: the call has to raise.
    """

    id: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[torch.Tensor, ...]
    inplace: bool = False
    process: Callable[[Any], Any] = lambda x: x
    resized: tuple[torch.Tensor, ...] | None = None
    refused: bool = False


def map_leaves(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Rebuild lists, tuples, dicts and slices with `fn` applied to everything else."""
    if isinstance(value, dict):
        return {k: map_leaves(v, fn) for k, v in value.items()}
    if isinstance(value, torch.Size):
        return fn(value)
    if isinstance(value, (list, tuple)):
        parts = [map_leaves(v, fn) for v in value]
        return (
            type(value)(*parts)
            if hasattr(value, "_fields")
            else (parts if isinstance(value, list) else tuple(parts))
        )
    if isinstance(value, slice):
        return slice(*(map_leaves(v, fn) for v in (value.start, value.stop, value.step)))
    return fn(value)


def take_tensors(args: Any, kwargs: Any) -> tuple[Any, Any, tuple[torch.Tensor, ...]]:
    """(args, kwargs) -> the same with Slots in the tensors' places, and the tensors; one slot per distinct
    tensor.
    """
    found: list[torch.Tensor] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        for i, seen in enumerate(found):
            if seen is leaf:
                return Slot(i)
        found.append(leaf)
        return Slot(len(found) - 1)

    return map_leaves(args, take), map_leaves(kwargs, take), tuple(found)


def put_tensors(template: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The inverse of `take_tensors`."""
    return map_leaves(template, lambda leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf)


# ---- tensors in other layouts and sizes ----


def is_plain(t: torch.Tensor) -> bool:
    """Strided, neither conjugated nor negated lazily: what the layout functions can rearrange."""
    return t.layout == torch.strided and not t.is_conj() and not t.is_neg() and not t.is_quantized


def copy_exactly(t: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, offset, overlaps and bits, in its own storage."""
    if t.is_leaf is False:
        t = t.detach()
    if t.layout != torch.strided or t.is_quantized:
        return t.detach().clone().requires_grad_(t.requires_grad)
    out = torch.empty(0, dtype=t.dtype, device=t.device)
    out.set_(t.untyped_storage().clone(), t.storage_offset(), t.shape, t.stride())
    out = out.conj() if t.is_conj() else out
    out = torch._neg_view(out) if t.is_neg() else out
    return out.requires_grad_(t.requires_grad)


def _like(t: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out.detach().requires_grad_(t.requires_grad)


def noncontiguous(t: torch.Tensor) -> torch.Tensor | None:
    """Every dimension strided by two, starting at an odd offset."""
    if t.dim() == 0 or t.numel() < 2:
        return None
    big = torch.zeros([2 * s + 1 for s in t.shape], dtype=t.dtype, device=t.device)
    view = big[tuple(slice(1, None, 2) for _ in t.shape)]
    view.copy_(t.detach())
    return _like(t, view)


def transposed(t: torch.Tensor) -> torch.Tensor | None:
    """Dimensions stored in the reverse order: Fortran layout."""
    if t.dim() < 2 or t.numel() < 2:
        return None
    order = tuple(reversed(range(t.dim())))
    return _like(t, t.detach().permute(order).contiguous().permute(order))


def offset(t: torch.Tensor) -> torch.Tensor | None:
    """Contiguous, one element into its storage: aligned to nothing."""
    if t.numel() < 1:
        return None
    big = torch.zeros(t.numel() + 1, dtype=t.dtype, device=t.device)
    view = big[1:].view(t.shape)
    view.copy_(t.detach())
    return _like(t, view)


def expanded(t: torch.Tensor) -> torch.Tensor | None:
    """The first dimension of size > 1 has stride 0."""
    for d, size in enumerate(t.shape):
        if size > 1 and t.numel():
            return _like(t, t.detach().narrow(d, 0, 1).clone().expand(t.shape))
    return None


def channels_last(t: torch.Tensor) -> torch.Tensor | None:
    """The memory format of convolutions, for 4 and 5 dimensions."""
    if t.dim() not in (4, 5) or t.numel() < 2:
        return None
    form = torch.channels_last if t.dim() == 4 else torch.channels_last_3d
    return _like(t, t.detach().contiguous(memory_format=form))


def marked(t: torch.Tensor) -> torch.Tensor | None:
    """The same elements, of which the conjugates or the negatives lie in memory: such is x.conj(), and its
    imaginary part."""
    if t.is_complex():
        return _like(t, t.detach().conj().resolve_conj().conj())
    return _like(t, torch._neg_view(-t.detach())) if t.is_floating_point() else None


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "noncontiguous": noncontiguous,
    "transposed": transposed,
    "offset": offset,
    "expanded": expanded,
    "channels_last": channels_last,
    "marked": marked,
}


def relaid(case: Case, layout: str) -> Case | None:
    """The case with every tensor in that layout; None where it changes no tensor."""
    changed = [LAYOUTS[layout](t) if is_plain(t) else None for t in case.tensors]
    if all(c is None for c in changed):
        return None
    tensors = tuple(t if c is None else c for t, c in zip(case.tensors, changed, strict=True))
    return dataclasses.replace(case, id=f"{case.id}:{layout}", tensors=tensors)


def grown(t: torch.Tensor) -> torch.Tensor:
    """Each size d > 1 becomes d + 1, equal sizes to equal sizes, values repeated; dense order of dimensions
    kept.
    """
    shape = [d + 1 if d > 1 else d for d in t.shape]
    values = t.detach()
    for dim, size in enumerate(shape):
        values = (
            values.index_select(dim, torch.arange(size, device=t.device) % max(t.shape[dim], 1))
            if size > 1
            else values
        )
    order = sorted(range(t.dim()), key=lambda d: (-t.stride(d), d))
    back = [order.index(d) for d in range(t.dim())]
    return _like(t, values.permute(order).contiguous().permute(back)) if t.dim() else _like(t, values.clone())


def resized(case: Case) -> tuple[torch.Tensor, ...] | None:
    """The case's tensors, all grown by one; None where nothing can grow."""
    if not all(is_plain(t) for t in case.tensors) or not any(d > 1 for t in case.tensors for d in t.shape):
        return None
    return tuple(grown(t) for t in case.tensors)


# ---- the cases of one operator and dtype ----

SIZES: tuple[tuple[int, ...], ...] = (
    (),
    (1,),
    (0,),
    (0, 3),
    (2, 0, 3),
    (37,),
    (5, 67),
    (3, 1, 17),
    (2, 3, 5, 7),
)


def _special_values(dtype: torch.dtype) -> list[Any]:
    if dtype.is_complex:
        return [0j, complex(math.inf, 1), complex(math.nan, 0), complex(1e-30, -1e30), complex(-1, -0.0)]
    if dtype.is_floating_point:
        f = torch.finfo(dtype)
        return [
            0.0,
            -0.0,
            1.0,
            -1.0,
            math.inf,
            -math.inf,
            math.nan,
            f.max,
            f.min,
            f.smallest_normal,
            f.smallest_normal * f.eps,
            f.eps,
            0.5,
            1.5,
            2.5,
            -2.5,
            88.8,
            -103.9,
        ]
    if dtype == torch.bool:
        return [True, False]
    i = torch.iinfo(dtype)
    # No -1 beside the minimum: their quotient traps in C++, in eager too.
    return [i.min, i.max, 0, 1, 2, 7, i.max - 1]


def _extra_inputs(op: opdb.Operator, dtype: torch.dtype) -> Iterator[tuple[str, tuple[torch.Tensor, ...]]]:
    """Sizes and special values for operators whose inputs may be any tensors."""
    make = functools.partial(
        torch.testing.make_tensor,
        dtype=dtype,
        device=op.device,
        low=None if dtype.is_complex else _low(op),
        high=None if dtype.is_complex else _high(op),
    )
    tensor = functools.partial(torch.tensor, dtype=dtype, device=op.device)
    for size in SIZES:
        yield f"size{'x'.join(map(str, size)) or 'scalar'}", tuple(make(size) for _ in range(op.arity))
    if op.name in opdb.UNDEFINED_ON_SPECIAL:
        return
    values = _special_values(dtype)
    for name, kept in (("special", values), ("special_nonzero", [v for v in values if v != 0])):
        if op.arity == 1:
            yield name, (tensor(kept * 3),)
        else:
            left, right = zip(*itertools.product(kept, kept), strict=True)
            yield name, (tensor(left), tensor(right))


def _low(op: opdb.Operator) -> float | None:
    domain = getattr(op.info, "domain", None)
    return None if domain is None or domain[0] is None else domain[0]


def _high(op: opdb.Operator) -> float | None:
    domain = getattr(op.info, "domain", None)
    return None if domain is None or domain[1] is None else domain[1]


def _spread(items: list[Case], count: int) -> list[Case]:
    """At most `count` of the items, the first and evenly spaced others."""
    if len(items) <= count:
        return items
    return [items[i * len(items) // count] for i in range(count)]


def _volume(case: Case) -> int:
    return max((t.numel() for t in case.tensors), default=0)


def build(op: opdb.Operator, dtype: torch.dtype, mode: Mode, samples: int, dynamic: bool) -> list[Case]:
    """The cases of one unit: database samples, their layouts, in-place forms, sizes and special values."""
    gradient = mode == "gradient"
    base: list[Case] = []
    broadcasting: set[str] = set()
    for i, s in enumerate(itertools.islice(op.samples(dtype, gradient), 400)):
        args, kwargs, tensors = take_tensors(s.args, s.kwargs)
        base.append(Case(f"s{i}", args, kwargs, tensors, process=s.process))
        if s.broadcasts_input:
            broadcasting.add(f"s{i}")
    chosen = _spread(base, samples)
    cases = list(chosen)
    shown = sorted((c for c in chosen if _volume(c) > 1), key=lambda c: -max(t.dim() for t in c.tensors))
    for layout in LAYOUTS:
        variants = (relaid(c, layout) for c in shown)
        cases += itertools.islice((v for v in variants if v is not None), 1 if gradient else 2)
    if op.inplace is not None and not (gradient and not chosen):
        able = [c for c in chosen if c.id not in broadcasting and c.tensors and isinstance(c.args[0], Slot)]
        for c in able[: 2 if gradient else 3]:
            cases.append(dataclasses.replace(c, id=f"{c.id}:inplace", inplace=True))
        for c in [] if gradient else shown[:1]:
            strided = relaid(c, "noncontiguous")
            if strided is not None and c in able:
                cases.append(dataclasses.replace(strided, id=f"{strided.id}:inplace", inplace=True))
    if (op.is_ufunc or op.is_reduction) and not gradient:
        kwargs = _defaults(op, dtype)
        for name, inputs in _extra_inputs(op, dtype):
            args, _, tensors = take_tensors(inputs, {})
            cases.append(Case(name, args, kwargs, tensors))
    if not gradient and not dynamic and op.device == "cpu":  # a GPU is lost where it meets such
        cases += refused(op.name, dtype, chosen)
    if dynamic:
        cases = [dataclasses.replace(c, resized=resized(c)) for c in cases]
    return cases


def _defaults(op: opdb.Operator, dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments an operator cannot do without, as its own database row gives them for generated
    inputs.
    """
    make = getattr(op.info, "sample_kwargs", None)
    if make is None:
        return {}
    kwargs = make(op.device, dtype, torch.ones((), dtype=dtype, device=op.device))
    return dict(kwargs[0]) if isinstance(kwargs, tuple) else {}


# ---- text ----


def show_tensor(t: torch.Tensor) -> str:
    """`f32[8,4]`, strides in braces where they are not contiguous, `+k` for a storage offset."""
    kind = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
    name = str(t.dtype).removeprefix("torch.")
    for long, short in kind.items():
        if name.startswith(long) and name[len(long) :].isdigit():
            name = short + name[len(long) :]
            break
    text = f"{name}[{','.join(map(str, t.shape))}]"
    if t.layout != torch.strided:
        return f"{text}:{str(t.layout).removeprefix('torch.')}"
    if not t.is_contiguous():
        text += "{" + ",".join(map(str, t.stride())) + "}"
    return text + (f"+{t.storage_offset()}" if t.storage_offset() else "")


def literal(value: Any, constants: dict[str, Any], slot: Callable[[int], str]) -> str:
    """Python source for a call's argument; what has no literal goes to `constants` under a new name."""
    if isinstance(value, Slot):
        return slot(value.index)
    if isinstance(value, slice):
        return (
            f"slice({', '.join(literal(v, constants, slot) for v in (value.start, value.stop, value.step))})"
        )
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {literal(v, constants, slot)}" for k, v in value.items()) + "}"
    if type(value) in (list, tuple, torch.Size):
        parts = ", ".join(literal(v, constants, slot) for v in value)
        return f"[{parts}]" if isinstance(value, list) else f"({parts},)" if len(value) else "()"
    if value is None or value is Ellipsis or type(value) in (bool, int, str):
        return "..." if value is Ellipsis else repr(value)
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f"float('{value}')"
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return str(value)
    if isinstance(value, torch.device):
        return f"torch.device('{value}')"
    for name, seen in constants.items():
        if seen is value:
            return name
    constants[f"c{len(constants)}"] = value
    return f"c{len(constants) - 1}"


def call_source(case: Case, constants: dict[str, Any], slot: Callable[[int], str]) -> str:
    """`t[0], t[1], dim=1`: the arguments of the call."""
    parts = [literal(a, constants, slot) for a in case.args]
    parts += [f"{k}={literal(v, constants, slot)}" for k, v in case.kwargs.items()]
    return ", ".join(parts)


def show(op: opdb.Operator, case: Case) -> str:
    """`add(f32[5,5], f32[5], alpha=2)`: the call as a person writes it, for reports."""
    text = call_source(case, {}, lambda i: show_tensor(case.tensors[i]))
    return f"{op.name}{'_ (in place)' if case.inplace else ''}({text})"


def apart(t: torch.Tensor) -> torch.Tensor:
    """A copy with a gap behind every element: ATen computes such ones with the C library, where it takes
    vectors of neighbours to SLEEF, whose fmod is NaN for huge quotients."""
    copy = t.new_empty((*t.shape, 2))[..., 0].copy_(t.detach())
    return copy.requires_grad_(t.requires_grad)


def widen(
    case: Case, tensors: Sequence[torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
    """The reference's arguments: inexact tensors and dtype arguments in fp64 or complex128."""

    def leaf(value: Any) -> Any:
        return (
            tolerance.wide(value) if isinstance(value, torch.dtype) and tolerance.is_inexact(value) else value
        )

    big = [t.detach().to(tolerance.wide(t.dtype), copy=True).requires_grad_(t.requires_grad) for t in tensors]
    return map_leaves(case.args, leaf), map_leaves(case.kwargs, leaf), big

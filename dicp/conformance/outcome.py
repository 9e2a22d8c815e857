"""What a call did, and whether two calls did the same: values, metadata, aliasing, mutation, gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import exact, opdb, tolerance
from .cases import Case, apart, put_tensors, widen


@dataclass(frozen=True)
class Outcome:
    """The result of one call.

    leaves: results, flattened; inputs: the tensors given, as the call left them; grads: of those that require
    it.
    """

    structure: str
    leaves: tuple[Any, ...]
    inputs: tuple[torch.Tensor, ...]
    grads: tuple[torch.Tensor | None, ...] = ()


@dataclass(frozen=True)
class Mismatch:
    """What differs: `check` is one of structure, type, dtype, shape, stride, alias, mutation, value,
    gradient.
    """

    check: str
    message: str


def flatten(value: Any) -> tuple[str, tuple[Any, ...]]:
    """A description of the containers, and their leaves in order."""
    if isinstance(value, dict):
        parts = [flatten(v) for v in value.values()]
        inside = ", ".join(f"{k!r}: {p[0]}" for k, p in zip(value, parts, strict=True))
        return "{" + inside + "}", tuple(x for p in parts for x in p[1])
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        parts = [flatten(v) for v in value]
        # torch.return_types and plain tuples are one thing here: Dynamo keeps the names, graph breaks may
        # not.
        mark = "list" if isinstance(value, list) else "tuple"
        return f"{mark}({', '.join(p[0] for p in parts)})", tuple(x for p in parts for x in p[1])
    return "*", (value,)


def differentiable(value: Any, process: Callable[[Any], Any]) -> list[torch.Tensor]:
    """The parts of a result that gradients flow through."""
    _, leaves = flatten(process(value))
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]


def cotangent(out: torch.Tensor) -> torch.Tensor:
    """The gradient fed into a result: fixed values around one, no symmetry that could hide a wrong index."""
    steps = torch.arange(out.numel(), dtype=torch.float64, device=out.device).reshape(out.shape)
    # Rounded to a few bits so that the same values exist in every dtype, the reference's included.
    values = ((0.5 + torch.frac(steps * 0.6180339887498949)) * 64).round() / 64
    return (torch.complex(values, 1.25 - values) if out.dtype.is_complex else values).to(out.dtype)


def gradients(
    result: Any, process: Callable[[Any], Any], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """d(result)/d(inputs) against `cotangent`, None for inputs that need none or are not reached."""
    outs = differentiable(result, process)
    wanted = [t for t in inputs if t.requires_grad]
    if not outs or not wanted:
        return tuple(None for _ in inputs)
    got = iter(torch.autograd.grad(outs, wanted, [cotangent(o) for o in outs], allow_unused=True))
    return tuple(next(got) if t.requires_grad else None for t in inputs)


def target(op: opdb.Operator, case: Case) -> Callable[..., Any]:
    """The function a case calls."""
    if not case.inplace:
        return op.call
    assert op.inplace is not None
    return op.inplace


def call(
    op: opdb.Operator,
    case: Case,
    tensors: Sequence[torch.Tensor],
    gradient: bool,
    seed: int = 0,
    wide: bool = False,
) -> Outcome:
    """Run a case eagerly. In-place forms write to a copy where the input is a leaf that requires
    gradients.
    """
    args, kwargs, given = (case.args, case.kwargs, list(tensors)) if not wide else widen(case, tensors)
    if wide and op.kind == "elementwise":
        given = [apart(t) for t in given]
    used = list(given)
    if case.inplace and gradient and given[0].requires_grad:
        used[0] = given[0].clone()
    torch.manual_seed(seed)
    with torch.set_grad_enabled(gradient):
        result = target(op, case)(*put_tensors(args, used), **put_tensors(kwargs, used))
    if wide and not gradient and not case.inplace and op.name in exact.FUNCTIONS:
        result = exact.refined(op.name, result, given[0], (*args[1:], *kwargs.values()))
    structure, leaves = flatten(result)
    grads = gradients(result, case.process, given) if gradient else ()
    return Outcome(structure, leaves, tuple(given), grads)


# ---- comparing ----


def _storage(t: torch.Tensor) -> int | None:
    return t.untyped_storage()._cdata if t.layout == torch.strided else None


def _aliases(o: Outcome) -> list[tuple[int, str, int, int]]:
    """(output, "input"|"output", the other's number, distance of the first elements) for shared storages."""
    found = []
    outs = [(i, x) for i, x in enumerate(o.leaves) if isinstance(x, torch.Tensor) and _storage(x) is not None]
    outs = [(i, x) for i, x in outs if x.numel()]  # what has no elements shares none
    for i, x in outs:
        for j, y in enumerate(o.inputs):
            if _storage(y) == _storage(x):
                found.append((i, "input", j, x.storage_offset() - y.storage_offset()))
        for j, y in outs:
            if j < i and _storage(y) == _storage(x):
                found.append((i, "output", j, x.storage_offset() - y.storage_offset()))
    return found


def _strides(t: torch.Tensor) -> tuple[int, ...]:
    """Strides that say something: those of sizes above one, in a tensor with elements."""
    if t.layout != torch.strided or t.numel() == 0:
        return ()
    return tuple(st for st, size in zip(t.stride(), t.shape, strict=True) if size > 1)


def _metadata(a: torch.Tensor, e: torch.Tensor, what: str) -> Mismatch | None:
    for check, mine, theirs in (
        ("dtype", a.dtype, e.dtype),
        ("shape", tuple(a.shape), tuple(e.shape)),
        ("type", a.layout, e.layout),
        ("type", a.device, e.device),
        ("stride", _strides(a), _strides(e)),
    ):
        if mine != theirs:
            if check == "stride":
                mine, theirs = a.stride(), e.stride()
            return Mismatch(check, f"{what}: compiled {mine}, eager {theirs} (shape {tuple(e.shape)})")
    return None


def _dense(t: torch.Tensor) -> torch.Tensor:
    t = t.detach()
    if t.layout != torch.strided:
        t = t.to_dense()
    if t.is_quantized:
        t = t.dequantize()
    return t.resolve_conj().resolve_neg()


def compare(
    op: opdb.Operator,
    case: Case,
    eager: Outcome,
    actual: Outcome,
    gradient: bool,
    fresh: Callable[[], list[torch.Tensor]],
    seed: int = 0,
) -> Mismatch | None:
    """The first difference between a compiled call and the eager one, None where they agree."""
    if eager.structure != actual.structure:
        return Mismatch("structure", f"compiled returns {actual.structure}, eager {eager.structure}")
    reference = Reference(op, case, gradient, fresh, seed)
    kind = "accumulating" if gradient else op.kind
    for i, (a, e) in enumerate(zip(actual.leaves, eager.leaves, strict=True)):
        if not isinstance(e, torch.Tensor) or not isinstance(a, torch.Tensor):
            if type(a) is not type(e):
                return Mismatch("type", f"result {i}: compiled {type(a).__name__}, eager {type(e).__name__}")
            if a != e and not (a != a and e != e) and not _near(a, e):
                return Mismatch("value", f"result {i}: compiled {a!r}, eager {e!r}")
            continue
        wrong = _metadata(a, e, f"result {i}")
        if wrong is None and a.requires_grad != e.requires_grad:
            wrong = Mismatch(
                "type", f"result {i}: requires_grad compiled {a.requires_grad}, eager {e.requires_grad}"
            )
        if wrong is not None:
            return wrong
        if op.name not in opdb.UNDEFINED_VALUES:
            why = reference.judge(a, e, "leaves", i, kind)
            if why is not None:
                return Mismatch("value", f"result {i}: {why}")
    if op.name not in opdb.UNSPECIFIED_ALIASING and _aliases(actual) != _aliases(eager):
        return Mismatch(
            "alias", f"(result, of, number, offset): compiled {_aliases(actual)}, eager {_aliases(eager)}"
        )
    for i, (a, e) in enumerate(zip(actual.inputs, eager.inputs, strict=True)):
        wrong = _metadata(a, e, f"input {i} afterwards")
        why = None if wrong or op.name in opdb.UNDEFINED_VALUES else reference.judge(a, e, "inputs", i, kind)
        if wrong or why:
            return Mismatch("mutation", wrong.message if wrong else f"input {i} afterwards: {why}")
    for i, (a, e) in enumerate(zip(actual.grads, eager.grads, strict=True)):
        if (a is None) != (e is None):
            return Mismatch("gradient", f"of input {i}: compiled {_presence(a)}, eager {_presence(e)}")
        if a is None or e is None:
            continue
        wrong = _metadata(a, e, f"gradient of input {i}")
        # Autograd promises no strides for gradients; shape, dtype and device it does.
        if wrong is not None and wrong.check != "stride":
            return Mismatch("gradient", wrong.message)
        why = reference.judge(a, e, "grads", i, "accumulating")
        if why is not None:
            return Mismatch("gradient", f"of input {i}: {why}")
    return None


def _presence(x: object) -> str:
    return "none" if x is None else "one"


def _near(a: object, e: object) -> bool:
    """Python floats that came out of tensors (`item`): fp32's rule, since their dtype is gone."""
    if not isinstance(a, (float, complex)) or not isinstance(e, (float, complex)):
        return False
    return abs(a - e) <= 4 * torch.finfo(torch.float32).eps * abs(e)


class Reference:
    """The fp64 run of a case, made when first needed, and its response to a small push of the inputs."""

    def __init__(
        self,
        op: opdb.Operator,
        case: Case,
        gradient: bool,
        fresh: Callable[[], list[torch.Tensor]],
        seed: int,
    ) -> None:
        self._op, self._case, self._gradient, self._fresh, self._seed = op, case, gradient, fresh, seed
        self._runs: dict[int, Outcome | None] = {}

    def _run(self, push: int) -> Outcome | None:
        """push 0: the reference; others: inputs moved by one eps of their own dtype, randomly up or down."""
        if push not in self._runs:
            tensors = self._fresh()
            if push:
                g = torch.Generator().manual_seed(push)
                tensors = [_pushed(t, g) for t in tensors]
            default = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            try:
                self._runs[push] = call(self._op, self._case, tensors, self._gradient, self._seed, wide=True)
            except Exception:  # an operator may refuse fp64 in any way: then no reference
                self._runs[push] = None
            finally:
                torch.set_default_dtype(default)
        return self._runs[push]

    def _part(self, push: int, part: str, index: int, shape: torch.Size) -> torch.Tensor | None:
        run = self._run(push)
        leaves = getattr(run, part) if run is not None else ()
        if (
            index >= len(leaves)
            or not isinstance(leaves[index], torch.Tensor)
            or leaves[index].shape != shape
        ):
            return None
        return _dense(leaves[index])

    def _eager_error(self, push: int, part: str, index: int, shape: torch.Size) -> torch.Tensor | None:
        """Eager's error on inputs moved by one eps: that it happens to be exact on these proves nothing."""
        g = torch.Generator().manual_seed(push)

        def moved() -> list[torch.Tensor]:
            return [
                _pushed(t, g.manual_seed(push)).detach().to(t.dtype).requires_grad_(t.requires_grad)
                for t in self._fresh()
            ]

        try:
            mine = call(self._op, self._case, moved(), self._gradient, self._seed)
            exact = Reference(self._op, self._case, self._gradient, moved, self._seed)._part(
                0, part, index, shape
            )
        except Exception:  # moved inputs may be none
            return None
        leaves = getattr(mine, part)
        if exact is None or index >= len(leaves) or leaves[index].shape != shape:
            return None
        return (_dense(leaves[index]).to(exact.dtype) - exact).abs()

    def judge(self, a: torch.Tensor, e: torch.Tensor, part: str, index: int, kind: Any) -> str | None:
        """`tolerance.judge` for one tensor of the outcome."""
        a, e = _dense(a), _dense(e)
        if a.numel() == 0 or tolerance.same_bits(a, e):
            return None
        ref = self._part(0, part, index, e.shape)

        def wobble() -> torch.Tensor | None:
            moved = [self._part(push, part, index, e.shape) for push in (1, 2, 3)]
            steps = [(m - ref).abs() for m in moved if m is not None and ref is not None]
            if kind == "accumulating" and tolerance.is_inexact(e.dtype):
                errors = [self._eager_error(push, part, index, e.shape) for push in (1, 2, 3)]
                steps += [2 * err for err in errors if err is not None]
            return torch.stack(steps).amax(0) if steps else None

        sizes = [
            float(t.detach().abs().nan_to_num(0, 0, 0).max())
            for t in self._fresh()
            if t.dtype.is_floating_point and t.numel() and t.layout == torch.strided
        ]
        return tolerance.judge(a, e, ref, kind, wobble, max(sizes, default=0.0))


def _pushed(t: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    if not tolerance.is_inexact(t.dtype) or t.layout != torch.strided:
        return t
    eps = torch.finfo(t.dtype).eps
    signs = torch.randint(0, 2, t.shape, generator=g).to(t.device, torch.float64) * 2 - 1
    moved = t.detach().to(tolerance.wide(t.dtype)) * (1 + eps * signs)
    return moved.requires_grad_(t.requires_grad)

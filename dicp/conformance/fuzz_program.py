"""The fuzzer's programs: writing them out, running them, comparing compiled with eager.

The yardstick is Monte Carlo arithmetic: the fp64 reference is run several times with every rounding
statement's result moved by one eps of the dtype the program computes in; where that does not explain a
difference, every step inside those statements and of their gradients is moved too (`fuzz_rounding.py`). How
far results then wander is what rounding alone may do to this program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from . import tolerance
from .fuzz_rounding import Noise
from .outcome import cotangent

RUNS = 6  # of the noisy reference
SLACK = 4.0  # how many times the widest wandering is allowed


@dataclass(frozen=True)
class Input:
    """A tensor argument. layout: contiguous | transposed | strided | expanded | negated (a negated view, of
    floats and complex numbers) | conjugated (a conjugated view, of complex numbers)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str = "contiguous"
    requires_grad: bool = False

    def make(self, seed: int) -> torch.Tensor:
        """The tensor, the same for the same seed; on a grid of eighths so that exact statements stay
        exact.
        """
        g = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, self.dtype)
        shape = self.shape
        if self.layout == "strided":
            shape = tuple(2 * s + 1 for s in shape)
        if self.layout == "expanded" and shape:
            shape = (1, *shape[1:])
        values = torch.randint(self._least(), 17, shape, generator=g)
        if dtype.is_complex:
            x = values.to(dtype) * (0.125 - 0.25j)
        elif dtype.is_floating_point:
            x = values.to(dtype) / 8
        else:
            x = values > 0 if dtype == torch.bool else values.to(dtype)
        if self.layout == "strided":
            x = x[tuple(slice(1, None, 2) for _ in shape)]
        elif self.layout == "transposed":
            x = x.mT.contiguous().mT if x.dim() > 1 else x
        elif self.layout == "expanded":
            x = x.expand(self.shape)
        elif self.layout == "negated" and tolerance.is_inexact(dtype):
            x = torch._neg_view(-x)
        elif self.layout == "conjugated" and dtype.is_complex:
            x = x.conj().resolve_conj().conj()
        return x.requires_grad_(self.requires_grad)

    def _least(self) -> int:
        """torch's negative of a complex zero is 0 or -0 by its position (vectors subtract, the rest changes
        signs), so that eager's negated views of zeros have one sign as complex numbers, another as reals."""
        return 1 if self.layout == "negated" and getattr(torch, self.dtype).is_complex else -16

    def source(self, seed: int) -> str:
        """Python that makes it, for a script that stands alone."""
        dims = (
            f"{tuple(self.shape)}" if self.layout != "strided" else f"{tuple(2 * s + 1 for s in self.shape)}"
        )
        if self.layout == "expanded" and self.shape:
            dims = f"{(1, *self.shape[1:])}"
        text = f"torch.randint({self._least()}, 17, {dims}, generator=torch.Generator().manual_seed({seed}))"
        if self.dtype == "bool":
            text = f"({text} > 0)"
        else:
            scale = " / 8" if "float" in self.dtype else " * (0.125 - 0.25j)"
            text += f".to(torch.{self.dtype})" + ("" if "int" in self.dtype else scale)
        if self.layout == "strided" and self.shape:
            text = f"({text})[{', '.join('1::2' for _ in self.shape)}]"
        elif self.layout == "transposed" and len(self.shape) > 1:
            text = f"({text}).mT.contiguous().mT"
        elif self.layout == "expanded":
            text = f"({text}).expand({tuple(self.shape)})"
        elif self.layout == "negated" and tolerance.is_inexact(getattr(torch, self.dtype)):
            text = f"torch._neg_view(-({text}))"
        elif self.layout == "conjugated" and "complex" in self.dtype:
            text = f"({text}).conj().resolve_conj().conj()"
        return f"({text}).requires_grad_()" if self.requires_grad else text


@dataclass(frozen=True)
class Statement:
    """`out = text` with `{0}`, `{1}` filled by args; out None for writes. noisy: its result, or what it
    writes to args[0], is rounded. `{rounded}(...)` in the text: a part of it whose result is rounded, too."""

    out: str | None
    text: str
    args: tuple[str, ...]
    noisy: bool
    rule: str

    def source(self) -> str:
        """One line of Python."""
        call = self.call(self.args)
        return call if self.out is None else f"{self.out} = {call}"

    def call(self, args: Iterable[str], rounded: str = "") -> str:
        """The text. rounded: what is called with parts that are rounded."""
        return self.text.format(*args, rounded=rounded)


@dataclass(frozen=True)
class Program:
    """Inputs, statements in order, results; sizes2: other input shapes for a second call, when dynamic."""

    seed: int
    inputs: tuple[Input, ...]
    body: tuple[Statement, ...]
    outputs: tuple[str, ...]
    dynamic: bool
    gradient: bool
    sizes2: tuple[tuple[int, ...], ...] = ()

    def source(self, noisy: bool = False, copies: frozenset[str] = frozenset()) -> str:
        """The function's text. noisy: for the reference, in fp64, with `push` around rounding statements
        (`jitter` behind writes), `pull` around what they read, and all of them in `inside(result)`; copies:
        results that are copies in the program, and would be their operands in fp64.
        """
        lines = [f"def f({', '.join(i.name for i in self.inputs)}):"]
        for s in self.body:
            line = s.source()
            if noisy and s.noisy and s.out is not None:
                call = s.call((f"pull({a}, {a!r})" for a in s.args), f"(lambda t: push(t, {s.out!r}))")
                line = f"with inside({s.out!r}): {s.out} = push({call}, {s.out!r}, {', '.join(s.args)})"
            if noisy and s.out in copies:
                line += ".clone()"
            lines.append("    " + line)
            if noisy and s.noisy and s.out is None:
                lines.append(f"    jitter({s.args[0]}, {s.args[0]!r})")
        lines.append(f"    return ({''.join(o + ', ' for o in self.outputs)})")
        text = "\n".join(lines)
        if not noisy:
            return text
        text = text.replace("torch.complex64", "torch.complex128").replace(".float()", ".double()")
        return re.sub(r"torch\.(bfloat16|float16|float32)\b", "torch.float64", text)


Inside = Callable[[], AbstractContextManager[None]]
Result = tuple[list[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor]]


def function(text: str, **names: Any) -> Any:
    """Compile a program's text."""
    space: dict[str, Any] = {"torch": torch, "F": F, **names}
    exec(compile(text, "<fuzz>", "exec"), space)
    return space["f"]


def inputs_of(p: Program, second: bool = False) -> list[torch.Tensor]:
    """The program's arguments, for its first or its second sizes."""
    inputs = p.inputs
    if second:
        inputs = tuple(replace(i, shape=s) for i, s in zip(inputs, p.sizes2, strict=True))
    return [i.make(p.seed * 100 + n) for n, i in enumerate(inputs)]


def run(f: Any, p: Program, args: list[torch.Tensor], inside: Inside = nullcontext) -> Result:
    """(results, the gradient of each argument or None, arguments afterwards) of one call; what autograd does
    is done in `inside()`."""
    with torch.set_grad_enabled(p.gradient):
        outs = list(f(*args))
    grads: list[torch.Tensor | None] = [None] * len(args)
    wanted = [k for k, a in enumerate(args) if a.requires_grad]
    through = [o for o in outs if o.requires_grad]
    if p.gradient and wanted and through:
        given = [cotangent(o) for o in through]
        with inside():
            found = torch.autograd.grad(through, [args[k] for k in wanted], given, allow_unused=True)
        for k, grad in zip(wanted, found, strict=True):
            grads[k] = grad
    return [o.detach() for o in outs], grads, [a.detach() for a in args]


# ---- the yardstick ----


def reference(
    p: Program, args: list[torch.Tensor], dtypes: dict[str, torch.dtype], push_seed: int, deep: bool = False
) -> Result | None:
    """The program in fp64; push_seed > 0: with noise of one eps after every rounding statement, and in every
    part of a gradient that one adds to what it reads. Where the program computes in fp64 too, the reference
    is no nearer to the truth than it: there a sum of n terms gets sqrt(n) eps. deep: with noise in each step
    of those statements and of their gradients too, of one eps of their dtype, or of fp32's, in which kernels
    for lower precision compute."""
    kinds = {i.name: a.dtype for i, a in zip(p.inputs, args, strict=True)} | dtypes
    noise = Noise(push_seed, kinds, deep)
    wide = [widened(a.detach()).requires_grad_(a.requires_grad) for a in args]
    copies = frozenset(
        s.out
        for s in p.body
        if s.out is not None and ".to(" in s.text and kinds.get(s.args[0]) != kinds.get(s.out)
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        f = function(p.source(noisy=True, copies=copies), **noise.names())
        with noise.steps():
            return run(f, p, wide, noise.inside)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None
    finally:
        torch.set_default_dtype(default)


def widened(a: torch.Tensor) -> torch.Tensor:
    """A floating-point or complex tensor in fp64, as it lies: whether statements copy depends on that."""
    if not tolerance.is_inexact(a.dtype):
        return a
    if a.is_conj():
        return widened(a.conj()).conj()
    if a.is_neg():
        return torch._neg_view(widened(torch._neg_view(a)))
    once = a[tuple(slice(0, 1 if s == 0 else None) for s in a.stride())]
    wide = torch.empty_strided(once.shape, once.stride(), dtype=tolerance.wide(a.dtype))
    return wide.copy_(once).expand(a.shape)


def eager_dtypes(p: Program, args: list[torch.Tensor]) -> dict[str, torch.dtype]:
    """The dtype of every variable as the program computes it."""
    seen: dict[str, torch.dtype] = {}

    def push(x: torch.Tensor, name: str, *operands: torch.Tensor) -> torch.Tensor:
        seen[name] = x.dtype
        return x

    lines = p.source(noisy=True).splitlines()
    # The noisy text has its dtypes widened; the names are what is needed, so take the plain statements with
    # push.
    text = [lines[0]]
    for s in p.body:
        call = s.call(s.args)
        text.append("    " + (f"{s.out} = push({call}, {s.out!r})" if s.out is not None else call))
    run(
        function("\n".join([*text, lines[-1]]), push=push),
        replace(p, gradient=False),
        [a.detach() for a in args],
    )
    return seen


@dataclass(frozen=True)
class Finding:
    """What is wrong with a compiled program. kind: error | crash | hang | metadata | value | gradient |
    mutation. result: which of the program's, where it is one of them.
    """

    kind: str
    message: str
    result: int | None = None


def differs(
    p: Program, second: bool, eager: Result, actual: Result, pardon: Result | None = None
) -> Finding | None:
    """The first difference that rounding does not explain. pardon: results that pass, wrong or not."""
    dtypes = cache(lambda: eager_dtypes(p, inputs_of(p, second)))

    @cache
    def noise(deep: bool) -> list[Result | None]:
        return [reference(p, inputs_of(p, second), dtypes(), k, deep) for k in range(RUNS + 1)]

    for part, kind in ((0, "value"), (1, "gradient"), (2, "mutation")):
        for i, (a, e) in enumerate(zip(actual[part], eager[part], strict=True)):
            if pardon is not None and tolerance.alike([a], [pardon[part][i]]):
                continue
            result = i if part == 0 else None
            if a is None or e is None:
                if (a is None) != (e is None):
                    return Finding(kind, f"{kind} {i}: one is None", result)
                continue
            if a.dtype != e.dtype or a.shape != e.shape:
                return Finding(
                    "metadata",
                    f"{kind} {i}: compiled {a.dtype} {tuple(a.shape)}, eager {e.dtype} {tuple(e.shape)}",
                    result,
                )
            # What torch's own fake implementations promise is all that a compiler is told.
            if part == 0 and _strides(a) != _strides(e) and _strides(a) != _promised(p, second, i):
                return Finding(
                    "metadata",
                    f"result {i}: strides compiled {a.stride()}, eager {e.stride()} of {tuple(e.shape)}",
                    result,
                )
            if tolerance.same_bits(a, e):
                continue
            why = _unexplained(a, e, [r[part][i] if r is not None else None for r in noise(False)])
            steps = noise(True) if why is not None else []
            if steps and None not in steps:
                why = _unexplained(a, e, [r[part][i] for r in steps if r is not None])
            if why is not None:
                return Finding(kind, f"{kind} {i} {e.dtype} {tuple(e.shape)}: {why}", result)
    return None


def _promised(p: Program, second: bool, result: int) -> tuple[int, ...]:
    """A result's strides by the fake implementations of what the program calls."""
    return _strides(_traced(p, second)[1][p.outputs[result]])


def misled(p: Program, second: bool) -> bool:
    """Whether a fake implementation errs about strides, so that what is a view in eager is none as traced, or
    the other way round."""
    real, fake = _traced(p, second)
    return any(_strides(t) != _strides(fake[name]) for name, t in real.items())


def _traced(p: Program, second: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The program's variables as eager makes them, and as the fake implementations of what it calls do. Where
    those need data, which breaks the graph that a compiler is given, they go on from what eager made."""
    names, space = [i.name for i in p.inputs], {"torch": torch, "F": F}
    real = dict(zip(names, inputs_of(p, second), strict=True))
    mode = FakeTensorMode()
    fake = {name: mode.from_tensor(t) for name, t in real.items()}
    with torch.set_grad_enabled(p.gradient):
        for s in p.body:
            exec(s.source(), space, real)
            try:
                with mode:
                    exec(s.source(), space, fake)
            except Exception:  # whatever a fake implementation raises for want of data
                if s.out is not None:
                    fake[s.out] = mode.from_tensor(real[s.out])
    return real, fake


def _strides(t: torch.Tensor) -> tuple[int, ...]:
    return tuple(st for st, n in zip(t.stride(), t.shape, strict=True) if n > 1) if t.numel() else ()


def _unexplained(a: torch.Tensor, e: torch.Tensor, runs: Sequence[torch.Tensor | None]) -> str | None:
    known = [r for r in runs if r is not None and r.shape == e.shape]
    wide = tolerance.wide(e.dtype)
    if not tolerance.is_inexact(a.dtype):
        return tolerance.judge(a, e, None, "elementwise")
    if len(known) < 2 or runs[0] is None:
        return tolerance.judge(a, e, None, "accumulating", lambda: e.to(wide).abs() * 0.01)
    ref = known[0].to(wide)
    wander = torch.stack([(r.to(wide) - ref).abs() for r in known[1:]]).amax(0)
    # An element that noise turns into NaN or infinity, or throws about by its own size, cannot be judged.
    wild = ~torch.isfinite(wander) | (wander > 0.05 * ref.abs().max())
    a, e, ref = (torch.where(wild, torch.zeros_like(x), x) for x in (a, e, ref))
    spread = float(torch.where(wild, torch.zeros_like(wander), wander).max()) if wander.numel() else 0.0
    extra = SLACK * spread
    why = tolerance.judge(a, e, ref, "accumulating")
    if why is None:
        return None
    gap = (a.to(wide) - ref).abs()
    theirs = (e.to(wide) - ref).abs()
    eps = torch.finfo(a.dtype).eps
    bound = (
        2 * float(theirs.nan_to_num(0, 0, 0).max())
        + extra
        + tolerance.ULPS[a.dtype] * eps * float(ref.abs().max())
    )
    return (
        f"{why} (rounding may move it by {spread:.3g})"
        if float(gap.nan_to_num(1e300).max()) > bound
        else None
    )

"""Make a failing program small: every step is tried, and kept where the program still fails in the same
way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from . import tolerance
from .fuzz_program import Input, Program, function, inputs_of

Fails = Callable[[Program], bool]


def shrink(p: Program, fails: Fails, tries: int = 250) -> Program:
    """The smallest program found within so many tries."""
    left = tries
    progress = True
    while progress and left > 0:
        progress = False
        for smaller in candidates(p):
            left -= 1
            if left <= 0:
                break
            if _runs(smaller) and fails(smaller):
                p, progress = smaller, True
                break
    return _renamed(p)


def candidates(p: Program) -> Iterator[Program]:
    """Simpler programs, the biggest steps first."""
    for o in p.outputs:
        if len(p.outputs) > 1:
            yield tidy(replace(p, outputs=(o,)))
    if p.dynamic:
        yield replace(p, dynamic=False)
    if p.gradient:
        yield replace(p, gradient=False, inputs=tuple(replace(i, requires_grad=False) for i in p.inputs))
    shapes = _shapes(p)
    for at in range(len(p.body)):
        yield from _without(p, at, shapes)
    for s in p.body:
        # An intermediate result as the only result.
        if s.out is not None and (s.out,) != p.outputs:
            yield tidy(replace(p, outputs=(s.out,)))
    for n, i in enumerate(p.inputs):
        for simpler in _simpler(i):
            yield replace(p, inputs=(*p.inputs[:n], simpler, *p.inputs[n + 1 :]))
    for size in sorted({d for i in p.inputs for d in i.shape if d > 1}, reverse=True):
        for to in (1, 2, size // 2, size - 1):
            if 1 <= to < size:
                yield replace(
                    p,
                    inputs=tuple(
                        replace(i, shape=tuple(to if d == size else d for d in i.shape)) for i in p.inputs
                    ),
                )


def _without(p: Program, at: int, shapes: dict[str, tuple[tuple[int, ...], str]]) -> Iterator[Program]:
    """Statement `at` gone: its result replaced by an operand, or by a new input."""
    s = p.body[at]
    rest = (*p.body[:at], *p.body[at + 1 :])
    if s.out is None:
        yield tidy(replace(p, body=rest))
        return
    for a in s.args:
        if shapes.get(a) == shapes.get(s.out):
            yield tidy(_substitute(replace(p, body=rest), s.out, a))
    if s.out in shapes:
        shape, dtype = shapes[s.out]
        grad = p.gradient and tolerance.is_inexact(getattr(torch, dtype))
        fresh = Input(f"x{_unused(p)}", shape, dtype, requires_grad=grad)
        q = _substitute(replace(p, body=rest, inputs=(*p.inputs, fresh)), s.out, fresh.name)
        yield tidy(replace(q, sizes2=(*q.sizes2, shape), dynamic=False))


def _unused(p: Program) -> int:
    return max(int(i.name[1:]) for i in p.inputs) + 1


def _substitute(p: Program, old: str, new: str) -> Program:
    body = tuple(replace(s, args=tuple(new if a == old else a for a in s.args)) for s in p.body)
    return replace(p, body=body, outputs=tuple(dict.fromkeys(new if o == old else o for o in p.outputs)))


def _simpler(i: Input) -> Iterator[Input]:
    if i.layout != "contiguous":
        yield replace(i, layout="contiguous")
    if i.dtype in ("bfloat16", "float16", "float64"):
        yield replace(i, dtype="float32")
    if i.dtype == "complex128":
        yield replace(i, dtype="complex64")
    if i.requires_grad:
        yield replace(i, requires_grad=False)
    if len(i.shape) > 1:
        yield replace(i, shape=i.shape[1:])
        yield replace(i, shape=i.shape[:-1])


def tidy(p: Program) -> Program:
    """Drop statements and inputs nothing depends on; writes stay while what they write to does."""
    needed = set(p.outputs)
    changed = True
    while changed:
        changed = False
        for s in reversed(p.body):
            alive = s.out in needed if s.out is not None else bool(set(s.args[:1]) & needed)
            # A view of a needed tensor may be written through.
            if not alive and s.out is not None and any(w.out is None and s.out == w.args[0] for w in p.body):
                alive = bool(set(s.args) & needed)
            if alive and not set(s.args) <= needed:
                needed |= set(s.args)
                changed = True
            if alive and s.out is not None and s.out not in needed:
                needed.add(s.out)
                changed = True
    body = tuple(s for s in p.body if (s.out in needed if s.out is not None else s.args[0] in needed))
    keep = [n for n, i in enumerate(p.inputs) if i.name in needed]
    sizes2 = tuple(p.sizes2[n] for n in keep) if p.sizes2 else ()
    return replace(p, body=body, inputs=tuple(p.inputs[n] for n in keep), sizes2=sizes2)


def _shapes(p: Program) -> dict[str, tuple[tuple[int, ...], str]]:
    """(shape, dtype) of every variable."""
    seen: dict[str, tuple[tuple[int, ...], str]] = {i.name: (i.shape, i.dtype) for i in p.inputs}

    def note(x: torch.Tensor, name: str) -> torch.Tensor:
        seen[name] = (tuple(x.shape), str(x.dtype).removeprefix("torch."))
        return x

    lines = [f"def f({', '.join(i.name for i in p.inputs)}):"]
    for s in p.body:
        call = s.call(s.args)
        lines.append("    " + (call if s.out is None else f"{s.out} = note({call}, {s.out!r})"))
    try:
        with torch.no_grad():
            function("\n".join([*lines, "    return ()"]), note=note)(*[a.detach() for a in inputs_of(p)])
    except (RuntimeError, IndexError, ValueError, TypeError):
        pass
    return seen


def _runs(p: Program) -> bool:
    if not p.outputs:
        return False
    try:
        from .fuzz_program import run

        run(function(p.source()), p, inputs_of(p))
        if p.dynamic:
            run(function(p.source()), p, inputs_of(p, second=True))
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    return True


def _renamed(p: Program) -> Program:
    """x0, x1, ... and v0, v1, ... without gaps."""
    names = {i.name: f"x{n}" for n, i in enumerate(p.inputs)}
    made = [s.out for s in p.body if s.out is not None]
    names |= {v: f"v{n}" for n, v in enumerate(made)}
    body = tuple(
        replace(s, out=None if s.out is None else names[s.out], args=tuple(names[a] for a in s.args))
        for s in p.body
    )
    return replace(
        p,
        body=body,
        inputs=tuple(replace(i, name=names[i.name]) for i in p.inputs),
        outputs=tuple(names[o] for o in p.outputs),
    )


def script(p: Program, backend: str, second: bool, finding: str) -> str:
    """A program that shows the fault and needs nothing but torch and the backend."""
    inputs = (
        p.inputs
        if not second
        else tuple(replace(i, shape=s) for i, s in zip(p.inputs, p.sizes2, strict=True))
    )

    def made(which: tuple[Input, ...]) -> str:
        return "\n".join(f"        {i.source(p.seed * 100 + n)}," for n, i in enumerate(which))

    body = re.sub(r"\bF\.", "torch.nn.functional.", p.source())
    lines = [
        "import torch",
        "",
        f"# {finding}",
        "",
        body,
        "",
        "",
        "def inputs():",
        "    return [",
        made(inputs),
        "    ]",
        "",
    ]
    if second:
        lines += ["", "def first_inputs():", "    return [", made(p.inputs), "    ]", ""]
    lines += ["", f"compiled = torch.compile(f, backend={backend!r}, dynamic={p.dynamic})"]
    if second:
        lines += ["compiled(*first_inputs())"]
    lines += [
        f"with torch.set_grad_enabled({p.gradient}):",
        "    expected, args = f(*(a := inputs())), a",
        "    actual, args2 = compiled(*(b := inputs())), b",
    ]
    if p.gradient:
        lines += [
            "for name, outs, given in (('eager', expected, args), ('compiled', actual, args2)):",
            "    parts = [o.real + o.imag if o.is_complex() else o for o in outs if o.requires_grad]",
            "    sum(o.double().sum() for o in parts).backward()",
            "    print(name, 'gradients', [g.grad for g in given])",
        ]
    lines += [
        "for e, a in zip(expected, actual):",
        "    print('eager   ', e.dtype, tuple(e.shape), e.stride(), e.detach().flatten()[:8])",
        "    print('compiled', a.dtype, tuple(a.shape), a.stride(), a.detach().flatten()[:8])",
        "",
    ]
    return "\n".join(lines)

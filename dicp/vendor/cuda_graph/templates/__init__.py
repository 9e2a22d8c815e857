"""Kernels around a given loop nest: products with what follows them (product.py), attention (attention.py).

A template is text made for one call: sizes and strides that are known stand in it as numbers, others are
arguments. What launch.py and the Python function need of it is what they need of a kernel from the kernel IR.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dicp.ir import index as ix
from dicp.ir.index import Index, Var
from dicp.ir.kernel import Param
from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim
from dicp.vendor.cuda_graph.expression import host_text
from dicp.vendor.cuda_graph.module import INDENT, WAIT, module_text


@dataclass(frozen=True)
class Template:
    """See module.Source, whose names these are. `operands`: the memory behind the pointers, in order."""

    name: str
    text: str
    params: tuple[Param, ...]
    sizes: tuple[str, ...]
    constants: dict[str, int]
    grid: str
    warps: int
    stages: int | None
    origins: tuple[str, ...]
    checks: bool = False
    registers: int | None = None
    contracted: bool = True  # nothing outside is compared with what a template computes

    @property
    def digest(self) -> str:
        return self.name


@dataclass(frozen=True)
class Launched:
    """A template and the windows on memory that its pointers stand for; None: scratch of `scratch` floats.
    ahead: the operands of which it reads before it has waited for the kernel before."""

    template: Template
    operands: tuple[View | None, ...]
    scratch: Index = 0
    ahead: tuple[int, ...] = ()


@dataclass(frozen=True)
class TemplateClaim(Claim):
    """A claim that launches kernels of its own. kernels(call): they, in order, made before the program is."""

    kernels: Callable[[Call], Sequence[Launched]] = field(default=lambda call: ())


def claim(name: str, kernels: Callable[[Call], Sequence[Launched]], **how: Any) -> TemplateClaim:
    """The claim of a call that templates serve; its memory is planned."""

    def emit(w: Any, c: Call) -> None:
        w.templates(c)

    return TemplateClaim(name, emit, out=how.pop("out", True), kernels=kernels, **how)


# -- text ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """A tensor of a template: its strides along the template's axes, in elements (0: the same for all)."""

    name: str
    view: View
    strides: tuple[Index, ...]

    @property
    def dtype(self) -> Any:
        return self.view.buffer.dtype

    def at(self, *positions: str, full: bool = False) -> str:
        """The address of an element: one position per axis, as text. full: a tile along all of them, also
        where they do not move the address."""
        terms = [self.name]
        for position, stride in zip(positions, self.strides, strict=True):
            if position == "0" or (stride == 0 and not full):
                continue
            terms.append(position if stride == 1 else f"{position} * {number(stride)}")
        return " + ".join(terms)


def number(i: Index) -> str:
    """A size or stride as text that can stand in a product."""
    text = host_text(i)
    return f"({text})" if " " in text else text


def size_names(*indices: Index) -> tuple[str, ...]:
    """The size symbols in indices, as arguments in a fixed order."""
    found = {a.name for i in indices for a in _leaves(i)}
    return tuple(sorted(found))


def _leaves(i: Index) -> list[Var]:
    out = []
    for a in ix.atoms(i):
        if isinstance(a, (ix.Div, ix.Mod)):
            out += [*_leaves(a.num), *_leaves(a.den)]
        elif isinstance(a, Var):
            out.append(a)
    return out


def make(
    stem: str,
    about: Sequence[str],
    params: Sequence[tuple[str, Any, bool, Index]],
    extents: Sequence[Index],
    constants: dict[str, int],
    body: Sequence[str],
    grid: str,
    origins: Sequence[str],
    warps: int,
    stages: int | None = None,
) -> Template:
    """The module of a template.

    params: name, dtype, written, elements. extents: what `body` and `grid` are made of. A body that does not
    say where it waits for the kernel before (WAIT) begins with that.
    """
    body = body if WAIT in body else [WAIT, *body]
    sizes = size_names(*extents)
    made = tuple(Param(name, dtype, written) for name, dtype, written, _ in params)
    heads = [*(p.name for p in made), *sizes, *(f"{c}: tl.constexpr" for c in ("INDEX", "PDL", *constants))]
    kinds = " ".join(str(p.dtype) for p in made)
    key = "\n".join([*body, *heads, kinds, str(constants), str(warps), str(stages), grid])
    name = f"{stem}_{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
    example = {
        "buffers": [
            (str(dtype).removeprefix("torch."), _example(elements), written)
            for _, dtype, written, elements in params
        ],
        "sizes": [64] * len(sizes),
        "flags": False,
        "programs": int(eval(grid, dict.fromkeys(sizes, 64))),
        "constants": dict(constants),
        "warps": warps,
    } | ({"stages": stages} if stages is not None else {})
    function = ["@triton.jit", f"def {name}({', '.join(heads)}):", *(INDENT + line for line in body)]
    text = module_text(name, origins, about, function, example, sizes)
    return Template(name, text, made, sizes, dict(constants), grid, warps, stages, tuple(origins))


def _example(elements: Index) -> int:
    return int(ix.evaluate(elements, lambda a: 64))


__all__ = ["Launched", "Operand", "Template", "TemplateClaim", "claim", "make", "number"]

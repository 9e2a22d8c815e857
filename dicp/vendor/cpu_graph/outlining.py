"""Kernels that differ in sizes only, as those of a network's blocks at each of its resolutions: the loops are
compiled once, as a function that also takes the sizes, and each kernel is a call of it.

What counts as a size is said in terms of the text that codegen.py writes: bounds of loops, steps of loop
variables, strides of vectors, the number of elements of a mean. Sizes that decide how a kernel is written
(whether vectors have a tail, which axis they go along) have done so by then: only equal texts are shared.
Divisors stay in the text, where the compiler makes multiplications of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dicp.vendor.cpu_graph.segment import EXPORT

LEAST = 32
"""Shorter loops are the compiler's to unroll."""

_ALONE = "__attribute__((noinline, noclone)) static "  # else the compiler makes one for each kernel again
_HEAD = "// Sizes are those of the kernels below; lines of the model, where they differ, the first one's.\n"

_SIZE = re.compile(
    "|".join(
        (
            r"(?<=\d < )\d+(?=;)|(?<=block < )\d+(?=;)",  # the bound of a loop
            r"(?<=LANES <= )\d+(?=[;)])|(?<=lanes_left\()\d+(?= - )|(?<![\w.])\d+(?= - block)",  # of its tail
            r"(?<![\w.])\d+(?= \* (?:i\d|block))",  # a step
            r"(?<=, )\d+(?=, (?:lanes|transposed|\d+, columns))",  # a stride
            r"(?<=double\()\d+(?=\))",  # a count
        )
    )
)
_COMMENT = re.compile(r" *//[^\n]*")
_FUNCTION = re.compile(r"^void (\w+)\((.*)\) \{$", re.MULTILINE)


@dataclass(frozen=True)
class Emitted:
    """A kernel's C++: comments, then one function `name`. origins: the model's lines it came from."""

    name: str
    text: str
    origins: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Form:
    """An emitted kernel taken apart: comments before the function, parameters, and the lines behind them, cut
    at each size."""

    of: Emitted
    head: str
    parameters: str
    pieces: tuple[str, ...]
    sizes: tuple[str, ...]

    @property
    def shape(self) -> tuple[str, ...]:
        """What kernels that share a body have in common."""
        return (self.parameters, *(_COMMENT.sub("", p) for p in self.pieces))


def outline(kernels: Sequence[Emitted]) -> list[Emitted]:
    """Source of all the kernels, which are exported: those that differ in sizes only as one text, named after
    the first."""
    groups: dict[tuple[str, ...], list[_Form]] = {}
    for form in map(_take_apart, kernels):
        groups.setdefault(form.shape, []).append(form)
    return [_one(forms[0]) if len(forms) == 1 else _shared(forms) for forms in groups.values()]


def _take_apart(kernel: Emitted) -> _Form:
    function = _FUNCTION.search(kernel.text)
    assert function is not None, kernel.text
    body = kernel.text[function.end() :]
    code = _COMMENT.sub(lambda c: " " * len(c[0]), body)  # of the same length: numbers in comments are none
    found = [m for m in _SIZE.finditer(code) if int(m[0]) >= LEAST]
    ends = [0, *(m.end() for m in found)]
    starts = [*(m.start() for m in found), len(body)]
    pieces = tuple(body[a:b] for a, b in zip(ends, starts, strict=True))
    return _Form(kernel, kernel.text[: function.start()], function[2], pieces, tuple(m[0] for m in found))


def _one(form: _Form) -> Emitted:
    return Emitted(form.of.name, _FUNCTION.sub(rf"{EXPORT}\g<0>", form.of.text, count=1), form.of.origins)


def _shared(forms: Sequence[_Form]) -> Emitted:
    first = forms[0]
    varying = dict.fromkeys(s for s in zip(*(f.sizes for f in forms), strict=True) if len(set(s)) > 1)
    names = {sizes: f"size{k}" for k, sizes in enumerate(varying)}  # n0, n1, ... are symbolic sizes
    columns = zip(*(f.sizes for f in forms), strict=True)
    words = [names.get(sizes, sizes[0]) for sizes in columns]
    body = "".join(p + w for p, w in zip(first.pieces, [*words, ""], strict=True))
    name = f"{first.of.name}_of_sizes"
    parameters = ", ".join([first.parameters, *(f"int64_t {n}" for n in names.values())])
    given = [p.split()[-1] for p in first.parameters.split(", ")]
    calls = [
        f"{f.head}{EXPORT}void {f.of.name}({first.parameters}) {{\n"
        f"  {name}({', '.join([*given, *(sizes[k] for sizes in names)])});\n}}"
        for k, f in enumerate(forms)
    ]
    text = "\n\n".join([f"{_HEAD}{_ALONE}void {name}({parameters}) {{{body}", *calls])
    return Emitted(first.of.name, text, tuple(dict.fromkeys(o for f in forms for o in f.of.origins)))


__all__ = ["LEAST", "Emitted", "outline"]

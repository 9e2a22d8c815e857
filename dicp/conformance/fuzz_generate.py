"""Random programs: the same for a seed everywhere, and such that eager runs them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from . import fuzz_complex, fuzz_network, fuzz_ops
from .fuzz_ops import Rule
from .fuzz_program import Input, Program, Statement, function, inputs_of, run
from .tolerance import is_inexact, wide

RULES = (*fuzz_ops.RULES, *fuzz_network.RULES, *fuzz_complex.RULES)

HIGHEST = 1e4  # magnitude of an element
HIGHEST_HALF = 200  # of a float16
ERRORS = (RuntimeError, IndexError, ValueError, TypeError)  # what torch raises for a call that means nothing
LAYOUTS = (*("contiguous",) * 6, "transposed", "strided", "expanded", "negated", "conjugated")
DRAWS = 16  # of operands that a rule may apply to
ROUNDING_WRITES = ("tanh", "mul_({1}", "addcmul")


@dataclass(frozen=True)
class Scale:
    """What dims a program's inputs have, how many elements a tensor of it at most, and whether its second
    sizes may be larger than the first."""

    sizes: tuple[int, ...]
    largest: int
    grows: bool


SMALL = Scale((1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 64), 20_000, True)
LARGE = Scale((1, 2, 3, 8, 31, 64, 100, 128, 257, 512, 1030, 4099), 300_000, False)
"""Loops run by several threads, split reductions, products and attention by tiles."""
LARGE_SHARE = 0.12  # of the programs


class Invalid(Exception):
    """The program means nothing for these sizes, or its numbers are too wild to compare."""


@dataclass(eq=False)
class _Variables:
    """What the statements so far have made: values, which of them every implementation computes to the last
    bit, the inputs that want gradients, and how many elements a value has at most."""

    values: dict[str, torch.Tensor]
    exact: dict[str, bool]
    grads: set[str]
    largest: int

    def all_exact(self, names: list[str]) -> bool:
        return all(self.exact[v] for v in names)

    def may_be_written(self, name: str) -> bool:
        """Not leaves, and not what torch loses writes to (dynamo_bridge/lost_writes.py)."""
        x = self.values[name]
        return name not in self.grads and not (x.dim() == 0 and x.dtype == torch.float64)


def generate(seed: int, longest: int = 14) -> Program:
    """A random program that eager runs, at both sizes if it is dynamic."""
    attempt = 0
    while True:
        rng = random.Random(seed * 1000 + attempt)
        attempt += 1
        try:
            return _generate(seed, rng, longest)
        except (Invalid, *ERRORS):
            if attempt > 200:
                raise


def _inputs(rng: random.Random, gradient: bool, scale: Scale) -> tuple[list[Input], dict[int, int]]:
    dims = rng.sample(scale.sizes, 3)
    main = rng.choice((*("float32",) * 4, "bfloat16", "float64", "float16", "complex64"))
    inputs: list[Input] = []
    for n in range(rng.randint(1, 4)):
        rank = rng.choice((0, 1, 2, 2, 2, 3, 3, 4))
        shape = tuple(rng.choice(dims) for _ in range(rank))
        while torch.Size(shape).numel() > scale.largest // 4:
            shape = shape[1:]
        if n and inputs and rng.random() < 0.5:
            shape = inputs[0].shape
        if rng.random() < 0.03 and shape:
            shape = (0, *shape[1:])
        dtype = (
            main
            if n == 0 or rng.random() < 0.7
            else rng.choice(("int64", "int32", "bool", "float32", "bfloat16", "uint8", "complex128"))
        )
        layout = rng.choice(LAYOUTS)
        grad = gradient and is_inexact(getattr(torch, dtype)) and rng.random() < 0.8
        inputs.append(Input(f"x{n}", shape, dtype, layout, grad))
    others = {d: [s for s in scale.sizes if 1 < s and (scale.grows or s <= d)] for d in dims if d > 1}
    return inputs, {d: rng.choice(sizes) for d, sizes in others.items()}


def _generate(seed: int, rng: random.Random, longest: int) -> Program:
    gradient, dynamic = rng.random() < 0.4, rng.random() < 0.3
    scale = LARGE if rng.random() < LARGE_SHARE else SMALL
    inputs, other = _inputs(rng, gradient, scale)
    if dynamic and any(torch.Size(other.get(d, d) for d in i.shape).numel() > scale.largest for i in inputs):
        raise Invalid("the second sizes are too large to run in reasonable time")
    made = _Variables(
        {i.name: i.make(seed * 100 + n).detach() for n, i in enumerate(inputs)},
        {i.name: True for i in inputs},
        {i.name for i in inputs if i.requires_grad},
        scale.largest,
    )
    body: list[Statement] = []
    wanted = rng.randint(2, longest)
    for _ in range(wanted * 8):
        if len(body) >= wanted:
            break
        s = _statement(rng, made, f"v{len(body)}")
        if s is not None:
            body.append(s)
    results = [s.out for s in body if s.out is not None]
    if not results:
        raise Invalid("nothing computed")
    used = {a for s in body for a in s.args}
    outputs = [v for v in results if v not in used or rng.random() < 0.15]
    if rng.random() < 0.1:
        outputs.append(rng.choice([i.name for i in inputs]))
    p = Program(
        seed,
        tuple(inputs),
        tuple(body),
        tuple(outputs or results[-1:]),
        dynamic,
        gradient,
        tuple(tuple(other.get(d, d) for d in i.shape) for i in inputs),
    )
    first = run(function(p.source()), p, inputs_of(p))
    if any(not torch.isfinite(o.to(wide(o.dtype))).all() for o in first[0]):
        raise Invalid("not finite")
    if p.dynamic:
        run(function(p.source()), p, inputs_of(p, second=True))
    return p


def _statement(rng: random.Random, made: _Variables, name: str) -> Statement | None:
    """A statement that eager ran, its effect noted in `made`; None where the dice came to none."""
    rule: Rule = rng.choices(RULES, [r.weight for r in RULES])[0]
    for _ in range(DRAWS):
        args = _operands(rng, rule, list(made.values))
        if rule.inplace and not made.may_be_written(args[0]) or rule.exact_in and not made.all_exact(args):
            continue
        text = rule.make(rng, [made.values[v] for v in args])
        if text is not None:
            break
    else:
        return None
    exact = rule.name == "view" or (rule.exact and made.all_exact(args))
    noisy = any(w in text for w in ROUNDING_WRITES) if rule.inplace else not exact
    s = Statement(None if rule.inplace else name, text, tuple(args), noisy, rule.name)
    result = _tried(s, made)
    if result is None:
        return None
    if rule.inplace:
        if s.noisy or not made.all_exact(args):
            _spoil(made, args[0])
        return s
    if any(_memory(result) == _memory(made.values[v]) for v in args):
        s = replace(s, noisy=False)
    made.values[name] = result
    made.exact[name] = (
        not is_inexact(result.dtype) or rule.name == "factory" or (rule.exact and made.all_exact(args))
    )
    return s


def _operands(rng: random.Random, rule: Rule, names: list[str]) -> list[str]:
    """Recent variables oftener: deep graphs rather than wide ones."""
    return [rng.choice(names[-5:]) if rng.random() < 0.6 else rng.choice(names) for _ in range(rule.operands)]


def _tried(s: Statement, made: _Variables) -> torch.Tensor | None:
    """The statement's result (of a write, the tensor written to); None where eager refuses it, or the result
    is too large or too wild. A write is undone then."""
    before = {} if s.out else {k: v.clone() for k, v in made.values.items()}
    lines = [f"def f({', '.join(made.values)}):", s.source(), f"return ({s.out or s.args[0]},)"]
    try:
        result = function("\n    ".join(lines))(**made.values)[0]
        if _usable(result, made.largest):
            return result  # type: ignore[no-any-return]
    except ERRORS:
        pass
    for k, v in before.items():  # a failed write may have been half done
        try:
            made.values[k].copy_(v)
        except RuntimeError:
            break
    return None


def _usable(x: object, largest: int) -> bool:
    if not isinstance(x, torch.Tensor) or x.numel() > largest or x.dim() > 5:
        return False
    limit = HIGHEST_HALF if x.dtype == torch.float16 else HIGHEST
    return not is_inexact(x.dtype) or x.numel() == 0 or bool((x.abs() < limit).all())


def _spoil(made: _Variables, name: str) -> None:
    """A write that rounds: everything that shares the memory is no longer exact."""
    for v, t in made.values.items():
        if _memory(t) == _memory(made.values[name]):
            made.exact[v] = False


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata  # type: ignore[no-any-return]

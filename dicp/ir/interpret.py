"""The meaning of scalar expressions: an interpreter over torch tensors, the reference for all generated code.

Each loop variable is an integer tensor, shaped to broadcast against the others: one call evaluates an
expression at every point of an iteration space.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dicp.errors import DivisionByZero, IndexOutOfRange
from dicp.ir import index as ix
from dicp.ir.expr import Expr, children
from dicp.ir.index import Index

Env = Callable[[ix.Atom], Any]
Load = Callable[[str, Any], torch.Tensor]
Ref = Callable[[str], torch.Tensor]
# The conditions of the `masked` expressions around an expression, outermost first.
Mask = tuple[Expr, ...]
Key = tuple[Expr, Mask]

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    name: getattr(torch, name)
    for name in """neg abs sign sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sin
    cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc erfinv lgamma digamma sigmoid
    floor ceil trunc isnan isinf signbit""".split()
} | {"round_even": torch.round, "lnot": torch.logical_not, "bnot": torch.bitwise_not}

BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    name: getattr(torch, name)
    for name in """add sub mul div remainder fmod pow atan2 hypot copysign nextafter minimum
    maximum fmin fmax lt le gt ge eq ne gcd lcm""".split()
} | {
    "div_trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "div_floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "land": torch.logical_and,
    "lor": torch.logical_or,
    "lxor": torch.logical_xor,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
}


def evaluate(expr: Expr, env: Env, load: Load, ref: Ref | None = None) -> torch.Tensor:
    """Value of an expression.

    env gives each loop variable and size symbol (int or int64 tensor); load(name, index) reads a buffer at a
    flat index tensor, or at a tuple of them for `at`; ref gives named scalars and results of earlier
    statements.
    """
    return evaluate_all((expr,), env, load, ref)[0]


def evaluate_all(
    exprs: tuple[Expr, ...], env: Env, load: Load, ref: Ref | None = None
) -> tuple[torch.Tensor, ...]:
    """Values of several expressions, each shared part computed once."""
    done: dict[Key, torch.Tensor] = {}
    stack: list[tuple[Key, bool]] = [((x, ()), False) for x in reversed(exprs)]
    while stack:
        key, ready = stack.pop()
        if key in done:
            continue
        if ready:
            done[key] = _apply(key, done, env, load, ref)
        else:
            stack.append((key, True))
            stack.extend((k, False) for k in reversed(_operands(key)))
    return tuple(done[x, ()] for x in exprs)


def _operands(key: Key) -> list[Key]:
    """What must be known first; the condition of a `masked` before what it guards."""
    x, mask = key
    if x.op == "masked":
        cond, value, other = x.args
        return [(cond, mask), (value, (*mask, cond)), (other, mask)]
    return [(c, mask) for c in children(x)]


def _apply(key: Key, done: dict[Key, torch.Tensor], env: Env, load: Load, ref: Ref | None) -> torch.Tensor:
    x, mask = key
    if x.op == "const":
        kind = torch.float64 if isinstance(x.args[0], float) else torch.int64
        return torch.tensor(x.args[0], dtype=kind).to(x.dtype)
    if x.op == "index":
        return torch.as_tensor(_position(x.args[0], mask, done, env), dtype=torch.int64)
    if x.op in ("load", "at"):
        return _load(x, mask, done, env, load)
    if x.op == "ref":
        assert ref is not None, f"no value for {x}"
        return ref(x.args[0])
    if x.op == "masked":
        cond, value, other = x.args
        return torch.where(done[cond, mask], done[value, (*mask, cond)], done[other, mask])
    args = [done[a, mask] for a in x.args if isinstance(a, Expr)]
    if x.op == "check":
        return _checked(x, args[0], args[1], _live(mask, done))
    if x.op == "nonzero":
        if bool((_live(mask, done) & (args[0] == 0)).any()):
            raise DivisionByZero(f"division check {x.args[1]} failed")
        return args[0]
    if x.op == "cast":
        return args[0].to(x.dtype)
    if x.op == "round":
        return args[0].to(x.args[1]).to(x.dtype)
    if x.op == "where":
        return torch.where(*args)
    if x.op == "fma":
        return args[0] * args[1] + args[2]
    out = UNARY[x.op](args[0]) if len(args) == 1 else BINARY[x.op](args[0], args[1])
    assert out.dtype == x.dtype, f"{x.op} on {args[0].dtype} gives {out.dtype}, declared {x.dtype}"
    return out


def _position(i: Index, mask: Mask, done: dict[Key, torch.Tensor], env: Env) -> Any:
    return ix.evaluate(i, lambda a: done[a.payload, mask] if isinstance(a, ix.Opaque) else env(a))


def _load(x: Expr, mask: Mask, done: dict[Key, torch.Tensor], env: Env, load: Load) -> torch.Tensor:
    """Elements of a buffer; positions at which the mask is false are not read, and give zero."""
    where = x.args[1] if isinstance(x.args[1], tuple) else (x.args[1],)
    idx = [torch.as_tensor(_position(i, mask, done, env), dtype=torch.int64) for i in where]
    if mask:
        live = _live(mask, done)
        if not live.any():
            return torch.zeros((), dtype=x.dtype)
        idx = [torch.where(live, i, 0) for i in idx]
    if not isinstance(x.args[1], tuple):
        return load(x.args[0], idx[0]).to(x.dtype)
    if any(i.numel() == 0 for i in idx):
        return torch.zeros(torch.broadcast_shapes(*(i.shape for i in idx)), dtype=x.dtype)
    return load(x.args[0], tuple(idx)).to(x.dtype)


def _live(mask: Mask, done: dict[Key, torch.Tensor]) -> torch.Tensor:
    """Where every condition of a mask holds."""
    live = torch.ones((), dtype=torch.bool)
    for depth, cond in enumerate(mask):
        live = live & done[cond, mask[:depth]]
    return live


def _checked(x: Expr, position: torch.Tensor, size: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """A run-time index, counted from the end when negative if `wrap`. Raises IndexError out of range."""
    wrap, number = x.args[2:]
    if wrap:
        position = torch.where(position < 0, position + size, position)
    if bool((live & ((position < 0) | (position >= size))).any()):
        raise IndexOutOfRange(f"index check {number} failed")
    return position

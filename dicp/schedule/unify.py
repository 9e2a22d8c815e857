"""Indices of one definition in terms of another's: the equations behind fusion.

mine (i, j)   theirs (a, b)      ->  i = a, j = b
mine (i)      theirs (6*a + b)   ->  i = 6*a + b, where i runs over all of a and b
mine (6*i + j)   theirs (a)      ->  a is to be refined into (i, j)
mine (6*i + j)   theirs (6*a + b)  ->  i = a, j = b, where the digits have the same sizes
"""

from __future__ import annotations

from dicp.ir import index as ix
from dicp.ir.index import Index, Var

Mapping = dict[ix.Atom, Index]


def is_variable(i: Index) -> bool:
    """Whether an index is a loop variable by itself; an atom may also be a quotient or a remainder."""
    return isinstance(i, ix.Poly) and i.is_atom and isinstance(i.terms[0][0][0], Var)


def variable(i: Index) -> Var:
    """The variable that an index is."""
    assert isinstance(i, ix.Poly) and i.is_atom
    return i.terms[0][0][0]  # type: ignore[return-value]


def loop_atoms(i: Index) -> list[Var]:
    """The loop variables of an index, in the order of their names."""
    return sorted((a for a in ix.atoms(i) if isinstance(a, Var) and a.size is not None), key=lambda a: a.name)


def linearization(i: Index) -> list[Var] | None:
    """[v0, v1, ...] when i is the row-major position over those variables, outermost first."""
    if not isinstance(i, ix.Poly):
        return None
    vs = loop_atoms(i)
    parts = [(v, ix.coefficient(i, v)) for v in vs]
    if any(p is None for _, p in parts):
        return None
    remaining = {v: p[0] for v, p in parts if p is not None}
    order: list[Var] = []
    step: Index = 1
    while remaining:
        nxt = next((v for v, c in remaining.items() if c == step), None)
        if nxt is None or nxt.size is None:
            return None
        order.append(nxt)
        step = step * nxt.size
        del remaining[nxt]
    order.reverse()
    return order if _position(order) == i else None


def _by_digits(pairs: list[tuple[Index, Index]]) -> list[tuple[Index, Index]]:
    """The pairs, with two positions over several variables each split into the digits that have to agree."""
    out: list[tuple[Index, Index]] = []
    for mine, theirs in pairs:
        blocks = None
        if not is_variable(mine) and not is_variable(theirs):
            left, right = linearization(mine), linearization(theirs)
            blocks = _blocks(left, right) if left and right else None
        out += [(mine, theirs)] if blocks is None else [(_position(a), _position(b)) for a, b in blocks]
    return out


def _blocks(mine: list[Var], theirs: list[Var]) -> list[tuple[list[Var], list[Var]]] | None:
    """Two row-major orders over equally many points cut into the shortest pieces that are equally large; None
    where they are not equally many, or symbolic sizes leave open where to cut."""
    out = []
    left, right = list(mine), list(theirs)
    while left and right:
        a, b = [left.pop()], [right.pop()]
        while (m := _points(a)) != (t := _points(b)):
            if not isinstance(m, int) or not isinstance(t, int) or not (left if m < t else right):
                return None
            a, b = ([left.pop(), *a], b) if m < t else (a, [right.pop(), *b])
        out.append((a, b))
    return None if left or right else out


def _points(line: list[Var]) -> Index:
    return ix.product(v.size for v in line if v.size is not None)


def _position(line: list[Var]) -> Index:
    return ix.linearize([ix.of(v) for v in line], [v.size for v in line])  # type: ignore[misc]


def unify(pairs: list[tuple[Index, Index]]) -> tuple[Mapping | None, dict[Var, list[Var]]]:
    """Solve `mine == theirs` for the variables of mine.

    Returns what each is in terms of theirs, and the parts of those variables of theirs that mine sees finer;
    None for the first where there is no solution.
    """
    mapping: Mapping = {}
    refine: dict[Var, list[Var]] = {}
    later: list[tuple[Index, Index]] = []
    for mine, theirs in _by_digits(pairs):
        if is_variable(mine):
            v = variable(mine)
            if v in mapping:
                later.append((mine, theirs))
                continue
            line = linearization(theirs)
            if line is None or _points(line) != v.size:
                return None, {}
            mapping[v] = theirs
        elif isinstance(mine, ix.Poly) and is_variable(theirs):
            parts = linearization(mine)
            g = variable(theirs)
            if parts is None or g in refine or any(p in mapping for p in parts) or _points(parts) != g.size:
                later.append((mine, theirs))
            else:
                refine[g] = parts
        else:
            later.append((mine, theirs))
    if refine:
        return (mapping, refine) if not later else (None, {})
    for mine, theirs in later:
        if ix.substitute(mine, mapping) != theirs:
            return None, {}
    return mapping, {}

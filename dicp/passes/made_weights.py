"""Weights that kernels make of what is in memory, each time a product reads them: integers of few bits that
are unpacked, shifted and scaled, sums of a weight and a correction, casts.

A product of one row reads each element of its weight once. Where it takes in what makes the weight, memory is
read once; else the weight is written, as wide as it is computed with, and read again.
"""

from __future__ import annotations

from torch.fx import Node

from dicp.ops.table import table
from dicp.passes.facts import is_tensor
from dicp.passes.freeze import is_folded
from dicp.passes.narrow_weights import stored, stored_by_groups
from dicp.passes.rules import sole_user


def is_made(weight: Node) -> bool:
    """Whether kernels compute a product's operand [K, N] element by element, and the product alone reads it.
    Not of what products read as it is stored, nor of what is made once."""
    if sole_user(weight) is None or is_folded(weight):
        return False
    if stored(weight) is not None or stored_by_groups(weight) is not None:
        return False
    made = {weight}
    stack = [weight] if _by_elements(weight) else []
    while stack:
        for x in stack.pop().all_input_nodes:  # asked again from each of its users
            if x not in made and x.users.keys() <= made and is_tensor(x) and _by_elements(x):
                made.add(x)
                stack.append(x)
    rows = (table().get(n.target) for n in made)  # type: ignore[call-overload]
    return any(row is not None and row.kind == "elementwise" for row in rows)


def _by_elements(node: Node) -> bool:
    """Whether an element is made of known elements of the operands."""
    row = table().get(node.target)  # type: ignore[call-overload]
    return row is not None and row.rule is not None and (row.moves or row.kind == "elementwise")


__all__ = ["is_made"]

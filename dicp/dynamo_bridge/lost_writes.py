"""In-place writes that torch loses on the way to a backend.

Dynamo gives every float64 tensor of no dims on the CPU a symbol for its number. Where nothing uses that,
AOTAutograd has Dynamo trace again without it, and with the symbol go all calls without users that return the
tensor: its in-place writes (torch 2.11 to 2.13, under every backend that uses AOTAutograd; 2.14 keeps them).
The first trace still has them, so it is then that the program is refused.
"""

from __future__ import annotations

import torch.fx as fx

from dicp import compat
from dicp.errors import DicpError
from dicp.ir.printer import user_location


def refuse_lost_writes(gm: fx.GraphModule) -> None:
    """Raises DicpError if the graph of the next trace would lack a write. To be called when AOTAutograd has
    asked for that trace."""
    for node in gm.graph.nodes:
        if not node.users and _writes(node) and compat.goes_with_its_symbol(node):
            raise DicpError(
                "torch would lose this write to a float64 tensor without dims: it traces the function again "
                "without the tensor's number, and without its in-place calls",
                where=user_location(node) or (),
                todo="give the tensor another dtype or a dim (shape (1,)), or write to it outside of the "
                "compiled function.",
            )


def _writes(node: fx.Node) -> bool:
    """Whether a call of Dynamo's graph is an in-place one."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    operator = getattr(node.target, "__module__", "") == "_operator" and name.startswith("i")
    return operator or "out" in node.kwargs or (name.endswith("_") and not name.endswith("__"))


__all__ = ["refuse_lost_writes"]

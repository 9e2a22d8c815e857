"""Calling a vendor: what its code raises names the vendor, and what it lacks is told before a compile."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from dicp.errors import DicpError, VendorError
from dicp.ir.printer import user_location
from dicp.vendor.base import takes_graphs

_EVERY = ("name", "device", "available", "supports", "keeps", "fingerprint")
_KERNEL = ("claim", "machine", "assemble")


def ask(vendor: Any, what: str, *args: Any, node: fx.Node | None = None) -> Any:
    """What the vendor's function `what` returns; node: the call that it is asked about. Raises VendorError
    where that raises anything but a DicpError or a lack of memory."""
    try:
        return getattr(vendor, what)(*args)
    except (DicpError, torch.OutOfMemoryError):
        raise
    except Exception as e:  # a vendor's code may raise anything
        about = "" if node is None else f" on {node.target}"
        where = "" if node is None else user_location(node) or ""
        raise VendorError(f"{vendor.name}.{what} failed{about}: {type(e).__name__}: {e}", where=where) from e


def require_whole(vendor: Any, name: str) -> None:
    """Raises VendorError where this is no vendor, or one that lacks a part of the protocol."""
    if isinstance(vendor, type):
        raise VendorError(f"vendor {name!r} is the class {vendor.__name__}, not an object of it")
    needed = _EVERY + (() if takes_graphs(vendor) else _KERNEL)
    missing = [a for a in needed if not hasattr(vendor, a)]
    if missing:
        raise VendorError(f"vendor {name!r} ({type(vendor).__name__}) lacks {', '.join(missing)}")


__all__ = ["ask", "require_whole"]

"""Calling a vendor: what its code raises names the vendor, and what it lacks is told before a compile."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.fx as fx

from dicp.errors import REPORT, DicpError, VendorError
from dicp.ir.printer import user_location
from dicp.vendor.base import takes_graphs

_EVERY = ("name", "device", "available", "supports", "keeps", "fingerprint")
_KERNEL = ("claim", "machine", "assemble")
_DATA = ("name", "device", "layout_costs")


class Asked:
    """A vendor whose functions raise VendorError where they would raise anything but a DicpError or a lack of
    a device's memory. That names the function, and the call of the graph that it was asked about."""

    def __init__(self, vendor: Any) -> None:
        self._vendor = vendor

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._vendor, name)
        if callable(value):
            return functools.partial(self._ask, name, value)
        if name not in _DATA:
            what = f"{self._vendor.name}.{name} is {value!r}, not a function"
            raise VendorError(what, todo=remedy(self._vendor))
        return value

    def _ask(self, name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (DicpError, torch.OutOfMemoryError):
            raise
        except Exception as e:  # a vendor's code may raise anything
            about, where = _about(args)
            what = f"{self._vendor.name}.{name} failed{about}: {type(e).__name__}: {e}"
            raise VendorError(what, where=where, todo=remedy(self._vendor)) from e


def emit(writer: Any, call: Any) -> None:
    """Have the claim of a Call (schedule/defs.py) write it. Raises VendorError, with the claim, the op and
    the user's line, where that raises anything but a DicpError."""
    try:
        call.claim.emit(writer, call)
    except (DicpError, torch.OutOfMemoryError):
        raise
    except Exception as e:  # a vendor's code may raise anything
        raise claim_error(call, f"{type(e).__name__}: {e}") from e


def claim_error(call: Any, problem: str) -> VendorError:
    """What is wrong with how a claim wrote a call."""
    what = f"the claim {call.claim.name!r} could not write its call of {call.node.target}: {problem}"
    ours = getattr(call.claim.emit, "__module__", "").partition(".")[0] == "dicp"
    return VendorError(what, where=user_location(call.node) or "", todo=REPORT if ours else "")


def _about(args: tuple[Any, ...]) -> tuple[str, str]:
    """Which op a vendor was asked about, and where the user calls it, as far as it was told."""
    node = next((a for a in args if isinstance(a, fx.Node)), None)
    if node is not None:
        return f" on {node.target}", user_location(node) or ""
    op = next((a for a in args if isinstance(a, torch._ops.OpOverload)), None)
    return ("" if op is None else f" on {op}"), ""


def remedy(vendor: Any) -> str:
    """What to do about a vendor's bug; the default, of others' vendors, is the empty text."""
    own = vendor._vendor if isinstance(vendor, Asked) else vendor
    return REPORT if type(own).__module__.partition(".")[0] == "dicp" else ""


def require_whole(vendor: Any, name: str) -> None:
    """Raises VendorError where this is no vendor, or one that lacks a part of the protocol."""
    if isinstance(vendor, type):
        raise VendorError(f"vendor {name!r} is the class {vendor.__name__}, not an object of it")
    needed = _EVERY + (() if takes_graphs(vendor) else _KERNEL)
    missing = [a for a in needed if not hasattr(vendor, a)]
    if missing:
        raise VendorError(f"vendor {name!r} ({type(vendor).__name__}) lacks {', '.join(missing)}")


__all__ = ["Asked", "claim_error", "emit", "remedy", "require_whole"]

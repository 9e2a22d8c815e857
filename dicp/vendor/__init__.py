"""The registry of vendors: whatever packages name under the entry-point group `dicp.vendors`."""

from __future__ import annotations

import difflib
import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dicp.errors import DicpError

GROUP = "dicp.vendors"


@functools.cache
def _entries() -> dict[str, EntryPoint]:
    return {e.name: e for e in entry_points(group=GROUP)}


def names() -> list[str]:
    """Names of the installed vendors."""
    return sorted(_entries())


def find(name: str) -> EntryPoint:
    """Where a vendor is loaded from. Raises DicpError naming near matches."""
    if name not in _entries():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise DicpError(f"no vendor {name!r}", todo=f"{hint}installed: {', '.join(names()) or 'none'}")
    return _entries()[name]


@functools.cache
def get(name: str) -> Any:
    """A vendor by name, loaded. Raises DicpError naming near matches."""
    return find(name).load()


def for_device(device: str) -> Any:
    """The vendor that serves a torch device type. Raises DicpError when there is none."""
    for name in names():
        vendor = get(name)
        if vendor.device == device:
            return vendor
    raise DicpError(
        f"no vendor serves device {device!r}",
        todo=f"installed vendors: {', '.join(f'{n} ({get(n).device})' for n in names())}",
    )

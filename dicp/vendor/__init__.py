"""The registry of vendors: whatever packages name under the entry-point group `dicp.vendors`."""

from __future__ import annotations

import difflib
import functools
import logging
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dicp.errors import DicpError, VendorError

GROUP = "dicp.vendors"
log = logging.getLogger("dicp")


@functools.cache
def _entries() -> dict[str, list[EntryPoint]]:
    """By name: one, unless packages name different vendors alike."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        others = found.setdefault(entry.name, [])
        if entry.value not in (e.value for e in others):
            others.append(entry)
    return found


def names() -> list[str]:
    """Names of the installed vendors."""
    return sorted(_entries())


def find(name: str) -> EntryPoint:
    """Where a vendor is loaded from. Raises DicpError naming near matches, VendorError where two packages
    have vendors of that name."""
    if name not in _entries():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise DicpError(f"no vendor {name!r}", todo=f"{hint}installed: {', '.join(names()) or 'none'}")
    entry, *others = _entries()[name]
    if others:
        raise VendorError(
            f"vendor {name!r} is in two packages: {' and '.join(map(_source, (entry, *others)))}",
            todo="uninstall one of them, or have its entry point of the group dicp.vendors renamed",
        )
    return entry


def require_one(name: str) -> None:
    """Raises VendorError where two packages have vendors of that name, whichever of them is used."""
    if name in _entries():
        find(name)


def _source(entry: EntryPoint) -> str:
    return f"{entry.value}, of the package {entry.dist.name if entry.dist else '?'}"


@functools.cache
def get(name: str) -> Any:
    """A vendor by name, loaded. Raises DicpError naming near matches, VendorError where what is installed
    under that name is no vendor."""
    from dicp.vendor.asking import require_whole

    entry = find(name)
    try:
        vendor = entry.load()
    except Exception as e:  # whatever the package's module raises as it is imported
        raise VendorError(
            f"vendor {name!r} ({_source(entry)}) cannot be loaded: {type(e).__name__}: {e}",
            todo="repair that package, or uninstall it",
        ) from e
    require_whole(vendor, name)
    return vendor


def for_device(device: str) -> Any:
    """The vendor that serves a torch device type: of several the one that ships with dicp, else the first by
    name. Raises DicpError when there is none."""
    serve = {}
    for name in sorted(names(), key=lambda n: (not _ships(n), n)):
        try:
            vendor = get(name)
        except VendorError as e:
            log.warning("%s", e.what)
            continue
        if vendor.device == device:
            return vendor
        serve[name] = vendor.device
    known = ", ".join(f"{name} ({served})" for name, served in sorted(serve.items()))
    raise DicpError(f"no vendor serves device {device!r}", todo=f"installed vendors: {known or 'none'}")


def _ships(name: str) -> bool:
    return any(e.dist is not None and e.dist.name == "dicp" for e in _entries()[name])

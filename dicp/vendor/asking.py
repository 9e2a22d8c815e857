"""Calling a vendor: what its code raises names the vendor, what it may leave out has a default, and what it
lacks is told before a compile."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

import torch
import torch.fx as fx

from dicp.config import Config
from dicp.errors import REPORT, DicpError, VendorError
from dicp.ir.expr import PRIMITIVES, STRUCTURE
from dicp.ir.kernel import Kernel
from dicp.ir.printer import user_location
from dicp.ir.value import KINDS
from dicp.vendor.base import HOOKS, MEMBERS, AnyVendor, GraphVendor, Vendor, VendorBase, takes_graphs

T = TypeVar("T")
_DATA = ("name", "device", *(name for name, default in HOOKS.items() if not callable(default)))


def asked(vendor: Any) -> AnyVendor:
    """The vendor as the rest of dicp asks it, with every hook, whatever it inherits: see Asked."""
    return cast("AnyVendor", vendor if isinstance(vendor, Asked) else Asked(vendor))


class Asked:
    """A vendor that has the default of each hook that it leaves out, or sets to None, and whose functions
    raise VendorError where they would raise anything but a DicpError or a lack of a device's memory. That
    names the function, and the call of the graph that it was asked about."""

    def __init__(self, vendor: Any) -> None:
        self._vendor = vendor

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._vendor, name, None) if name in HOOKS else getattr(self._vendor, name)
        if value is None and name in HOOKS:
            default = HOOKS[name]
            return functools.partial(default, self) if callable(default) else default
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


def fingerprint(vendor: AnyVendor, config: Config) -> str:
    """What the vendor's code depends on. Raises VendorError where that is no text."""
    told = vendor.fingerprint(config)
    if not isinstance(told, str):
        raise VendorError(f"{vendor.name}.fingerprint gave {told!r}, which is no text", todo=remedy(vendor))
    return told


def emit(writer: Any, call: Any) -> None:
    """Have the claim of a Call (schedule/defs.py) write it. Raises VendorError, with the claim, the op and
    the user's line, where that raises anything but a DicpError."""
    try:
        call.claim.emit(writer, call)
    except (DicpError, torch.OutOfMemoryError):
        raise
    except Exception as e:  # a vendor's code may raise anything
        raise claim_error(call, f"{type(e).__name__}: {e}") from e


def emitted(program: Any, write: Callable[[Kernel, str], T]) -> dict[str, T]:
    """What `write(kernel, name)` makes of each distinct kernel of a Program (runtime/program.py), by the
    kernel's digest; the name is one for a function. Raises VendorError, with the kernel, its ops and the
    user's lines, where that raises anything but a DicpError."""
    first: dict[str, Kernel] = {}
    for launch in program.launches:
        first.setdefault(launch.kernel.digest, launch.kernel)
    return {digest: _written(first[digest], name, write) for digest, name in program.kernel_names().items()}


def _written(kernel: Kernel, name: str, write: Callable[[Kernel, str], T]) -> T:
    try:
        return write(kernel, name)
    except DicpError:
        raise
    except Exception as e:  # a vendor's code may raise anything
        what = f"no code could be written for the kernel {name}: {type(e).__name__}: {e}"
        ours = getattr(write, "__module__", "").partition(".")[0] == "dicp"
        raise VendorError(what, where=kernel.origins, todo=REPORT if ours else "") from e


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


def has(vendor: object, member: Callable[..., Any]) -> bool:
    """Whether a vendor has a function of the protocol, told as `Vendor.aten_call`, of its own."""
    return _has(unwrapped(vendor), member.__name__)


def _has(vendor: object, name: str) -> bool:
    own = getattr(vendor, name, None)
    return own is not None and getattr(own, "__func__", own) is not MEMBERS.get(name)


def unwrapped(vendor: Any) -> Any:
    """The vendor itself."""
    return vendor._vendor if isinstance(vendor, Asked) else vendor


def remedy(vendor: object) -> str:
    """What to do about a vendor's bug; the default, of others' vendors, is the empty text."""
    return REPORT if type(unwrapped(vendor)).__module__.partition(".")[0] == "dicp" else ""


def require_whole(vendor: Any, name: str = "") -> None:
    """Raises VendorError where this is no vendor, one that lacks a required part of the protocol, or one with
    a public name that reads like an optional part which it lacks. name: the one it is installed under."""
    name = name or getattr(vendor, "name", "?")
    if isinstance(vendor, type):
        raise VendorError(f"vendor {name!r} is the class {vendor.__name__}, not an object of it")
    whose = f"vendor {name!r} ({type(vendor).__name__})"
    families = (VendorBase, GraphVendor if takes_graphs(vendor) else Vendor)
    asks = ("name", "device", *(n for family in families for n in vars(family) if n in MEMBERS))
    lacks = [n for n in asks if not _has(vendor, n)]
    missing = [n for n in lacks if n not in HOOKS]
    if missing:
        raise VendorError(f"{whose} lacks {', '.join(missing)}")
    if takes_graphs(vendor) and hasattr(vendor, "assemble"):
        both = "has `build`, of a vendor that takes graphs, and `assemble`, of one that takes kernels"
        raise VendorError(f"{whose} {both}", todo="rename one of them")
    _require_device(vendor.device, whose)
    if not takes_graphs(vendor):
        _require_words(getattr(vendor, "words", None), whose)
    for given in dir(vendor):
        near = difflib.get_close_matches(given, lacks, n=1, cutoff=0.8)
        if near and given not in asks and not given.startswith("_"):
            what = f"{whose} has {given!r}, which dicp does not know: did you mean {near[0]!r}?"
            todo = f"rename it to {near[0]!r} or, if it is a helper of yours, make it private (_{given})"
            raise VendorError(what, todo=todo)


def _require_device(device: Any, whose: str) -> None:
    try:
        known = torch.device(device).type == device
    except (RuntimeError, TypeError):
        known = False
    if not known:
        what = f"{whose} serves the device {device!r}, which is no type of torch's devices"
        todo = 'name the type alone, as a text: "cpu", "cuda", or what your torch extension registers'
        raise VendorError(what, todo=todo)


def _require_words(words: Any, whose: str) -> None:
    """An unknown word is a misspelt one, and would cost kernels unnoticed."""
    if words is None:
        return
    if isinstance(words, str) or not isinstance(words, Collection):
        what = f"{whose} has as `words` {words!r}, which is no set of names"
        raise VendorError(what, todo="write `words = frozenset(...)`: it is no function")
    known = PRIMITIVES | STRUCTURE | KINDS | {"scan"}
    for word in sorted(set(words) - known, key=str):
        near = difflib.get_close_matches(str(word), known, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        what = f"{whose} has the word {word!r}, which is neither a primitive nor a kind of reductions{hint}"
        raise VendorError(what, todo="see UNARY, BINARY and TERNARY in dicp/ir/expr.py")


__all__ = [
    "Asked",
    "asked",
    "claim_error",
    "emit",
    "emitted",
    "fingerprint",
    "has",
    "remedy",
    "require_whole",
    "unwrapped",
]

"""The errors dicp raises: each says what happened, where in the user's model, and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class DicpError(RuntimeError):
    """Base of every dicp error.

    `what` is one sentence, `where` the user's lines ("model.py:12  y = x @ w"), `todo` the remedy.
    """

    def __init__(self, what: str, *, where: str | Sequence[str] = (), todo: str = "") -> None:
        self.what = what
        self.where: tuple[str, ...] = (where,) if isinstance(where, str) else tuple(where)
        self.todo = todo
        lines = [what, *(f"  at {line}" for line in self.where if line)]
        if todo:
            lines.append(f"  To fix: {todo}")
        super().__init__("\n".join(lines))


class UnsupportedOp(DicpError):
    """An operator nobody claims, lowers or decomposes, where falling back is not allowed."""


REPORT = (
    "this is a bug in dicp: report it, with what `python -m dicp.info` prints and DICP_DUMP=<folder> writes"
)


class InternalError(DicpError):
    """A bug of dicp's own; the exception that showed it, if one did, is the cause. The remedy begins with the
    report of it."""

    def __init__(self, what: str, *, where: str | Sequence[str] = (), todo: str = "") -> None:
        super().__init__(what, where=where, todo=f"{REPORT}. {todo}" if todo else REPORT)


class VendorError(DicpError):
    """A vendor's own code failed (what it raised is the cause), or gave what the protocol does not allow."""

    def __init__(self, what: str, *, where: str | Sequence[str] = (), todo: str = "") -> None:
        super().__init__(what, where=where, todo=todo or "this is the vendor's: see docs/adding_a_vendor.md")


class BuildError(DicpError):
    """The compiler refused (or never finished) a generated source file.

    `message` is the head of the compiler's own output, `source` the kept file.
    """

    def __init__(
        self,
        what: str,
        *,
        message: str = "",
        source: str = "",
        where: str | Sequence[str] = (),
        todo: str = "",
    ) -> None:
        self.message = message
        self.source = source
        text = what
        if source:
            text += f"\n  source: {source}"
        if message:
            text += "\n" + "\n".join(f"  | {line}" for line in message.splitlines())
        super().__init__(text, where=where, todo=todo)


class ToolchainError(DicpError):
    """A tool the build needs is missing or unusable; `todo` says what to install."""


class OptionError(DicpError, ValueError):
    """An unknown mode or option, or a value of the wrong type."""


class VerifyError(DicpError):
    """A pass produced a graph that contradicts its own meta, or a kernel its reference."""


class CacheError(DicpError):
    """The build cache, or what was saved of a compile, cannot be used as it stands: ownership, permissions,
    no place to write, damage, another machine."""


class NoCompileError(DicpError):
    """A build was needed while `no_compile` forbids building."""


class IndexOutOfRange(IndexError, RuntimeError):
    """An index read at run time lies outside its dimension. Eager raises IndexError, but RuntimeError for
    gather and scatters; handlers of either see this."""


class DivisionByZero(ZeroDivisionError, RuntimeError):
    """An integer was divided by zero on the CPU. Eager raises a RuntimeError that reads ZeroDivisionError."""


_CHECKS: dict[str, type[Exception]] = {"IndexError": IndexOutOfRange, "ZeroDivisionError": DivisionByZero}


def check_error(message: str) -> Exception:
    """What a failed run-time check raises. Messages read "IndexError: ..." or "ZeroDivisionError: ..."."""
    kind, _, text = message.partition(": ")
    return _CHECKS[kind](message if kind == "ZeroDivisionError" else text)

"""The Python function that every program becomes: what its text begins with, and its making."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dicp.compat import forward_ad
from dicp.runtime.entry import content_hash
from dicp.runtime.failure import refuse_tangents

FIRST_LINE = "if forward_ad._current_level >= 0: refuse_tangents(args)"
FIRST_GLOBALS = {"forward_ad": forward_ad, "refuse_tangents": refuse_tangents}


OWN_GLOBALS = ("call", "__builtins__", "__name__", "__loader__")
"""What making the function adds to its globals."""


@dataclass(frozen=True)
class _Loader:
    """Where tracebacks find the text of the lines that they name."""

    source: str

    def get_source(self, name: str) -> str:
        return self.source


def make_function(name: str, source: str, values: dict[str, Any]) -> Callable[[list[Any]], Any]:
    """The function `call` that the source defines, with `values` as its globals. Raises SyntaxError with the
    line, which a claim may have written."""
    # Names in angle brackets are taken for files without text; programs of two processes may be named alike.
    where = f"dicp {name} {content_hash(source)[:8]}"
    try:
        code = compile(source, where, "exec")
    except SyntaxError as e:
        line = (e.text or "").strip()
        said = f"{e.msg} in line {e.lineno} of the program's function: {line}"
        raise SyntaxError(said, (where, e.lineno, e.offset, e.text)) from None
    values.update({"__name__": where, "__loader__": _Loader(source)})
    exec(code, values)
    call: Any = values["call"]
    call._boxed_call = True
    return call  # type: ignore[no-any-return]


__all__ = ["FIRST_GLOBALS", "FIRST_LINE", "OWN_GLOBALS", "make_function"]

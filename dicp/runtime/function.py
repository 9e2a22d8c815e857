"""The Python function that every program becomes: what its text begins with, and its making."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dicp.compat import forward_ad
from dicp.runtime.failure import refuse_tangents

FIRST_LINE = "if forward_ad._current_level >= 0: refuse_tangents(args)"
FIRST_GLOBALS = {"forward_ad": forward_ad, "refuse_tangents": refuse_tangents}


def make_function(name: str, source: str, values: dict[str, Any]) -> Callable[[list[Any]], Any]:
    """The function `call` that the source defines, with `values` as its globals."""
    exec(compile(source, f"<dicp {name}>", "exec"), values)
    call: Any = values["call"]
    call._boxed_call = True
    return call  # type: ignore[no-any-return]


__all__ = ["FIRST_GLOBALS", "FIRST_LINE", "make_function"]

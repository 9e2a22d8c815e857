"""One line for each recompile: the function, the guard that failed, what it expected and what came."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from dicp import compat
from dicp.config import Config
from dicp.runtime.dump import say

_TYPE_CHECK = re.compile(r"___check_type_id\((.+), \d+\), type=(.+)")
_CALLS = ("len", "item", "size", "stride", "dim")  # in guards; none of them changes anything


def note_recompile(config: Config) -> None:
    """Log a line where Dynamo compiles a function that it had compiled before; called by the backend."""
    reason = compat.recompile_reason()
    if reason is None:
        return
    compat.counters()["recompiles"] += 1
    say(describe(reason, *compat.compiled_frame()), config)


def describe(reason: str, where: str, values: Mapping[str, Any]) -> str:
    """The line. reason: torch's text; where: the function; values: its arguments by name.

    torch names both values for tensors ("size mismatch at index 0. expected 5, actual 6") and the expected
    one alone for numbers, flags and types ("k == 1"): there what came is looked up among the arguments.
    """
    text = re.sub(r"^\d+/\d+: ", "", reason)
    guard = " ".join(text.split("User stack trace:")[0].split("#")[0].split()).rstrip(" ,")
    checked = _TYPE_CHECK.match(guard)
    if checked:
        found, value = _value(checked[1], values)
        guard = f"type of {checked[1]} is {checked[2]}" + (f", now {type(value)}" if found else "")
    else:
        try:
            tree = ast.parse(guard, mode="eval").body
        except SyntaxError:
            tree = ast.Constant(None)
        if isinstance(tree, ast.Compare):
            side = next((s for s in (tree.left, *tree.comparators) if not isinstance(s, ast.Constant)), tree)
            found, value = _value(ast.unparse(side), values)
            if found and isinstance(value, (bool, int, float, complex, str, type(None))):
                guard += f", now {value!r}"
    return f"recompile {where}: {guard}"


def _value(expression: str, values: Mapping[str, Any]) -> tuple[bool, Any]:
    """Whether names, attributes, items and a few calls lead to a value among these, and the value."""
    allowed = (ast.Expression, ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Load, ast.Call)
    try:
        tree = ast.parse(expression, mode="eval")
        for node in ast.walk(tree):
            if not isinstance(node, allowed):
                return False, None
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] not in _CALLS:
                return False, None
        names = {"__builtins__": {}, "len": len, "L": dict(values)}
        return True, eval(compile(tree, "<guard>", "eval"), names, dict(values))
    except Exception:  # whatever the user's attributes raise: the line then goes without the value
        return False, None


__all__ = ["describe", "note_recompile"]

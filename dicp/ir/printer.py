"""The graph as typed SSA text, in the notation of JAX and torch.

graph   ::= "graph(" [ name ": " type { ", " name ": " type } ] "):" { line } return
line    ::= "  " name ": " type " = " expr [ "  # " location ]
expr    ::= op "(" args ")" | name "[" int "]"            the latter takes one of several results
type    ::= dtype "[" sizes "]" [ "@" perm ] | "Sym(" size ")" | "(" types ")"
perm    ::= the dims from outermost to innermost in memory, where a layout pass chose them
return  ::= "  return " args
"""

from __future__ import annotations

import functools
import operator
import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dicp.ir.meta_keys import LAYOUT_KEY

_TORCH = os.path.dirname(torch.__file__) + os.sep

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.bool: "b8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in .*$')
_INT_MAX = 2**63 - 1
_DROPPED_KWARGS = {("layout", torch.strided), ("pin_memory", False), ("non_blocking", False)}


def dtype_name(dtype: torch.dtype) -> str:
    """f32, bf16, i64, ...; torch's own name for what has no short one."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def op_name(target: object) -> str:
    """`add`, `sum.dim_IntList`, `dicp.linear`: aten and the default overloads go without saying."""
    if isinstance(target, torch._ops.OpOverload):
        space, name = target._schema.name.split("::")
        overload = target._overloadname
        text = name if space == "aten" else f"{space}.{name}"
        return text if overload in ("default", "Tensor") else f"{text}.{overload}"
    return str(getattr(target, "__name__", target))


def user_line(node: Node) -> tuple[str, int, str] | None:
    """(file, line number, source text) of the innermost frame outside torch that made the node."""
    return _innermost_line(node.meta.get("stack_trace") or "")


@functools.lru_cache(256)  # the calls that one line of a model makes have one trace, in every layer
def _innermost_line(trace: str) -> tuple[str, int, str] | None:
    lines, found = trace.splitlines(), None
    for i, text in enumerate(lines):
        frame = _FRAME.match(text)
        if frame is None or frame["file"].startswith(_TORCH):
            continue
        code = lines[i + 1].strip() if i + 1 < len(lines) and not _FRAME.match(lines[i + 1]) else ""
        found = (frame["file"], int(frame["line"]), code)
    return found


def user_location(node: Node) -> str | None:
    """`model.py:12  y = x @ w`: where in the user's model the node comes from. Without the backslash of a
    line that goes on: it would make the next line of generated C++ part of the comment."""
    line = user_line(node)
    if line is None:
        return None
    file, number, code = line
    return f"{file.rsplit('/', 1)[-1]}:{number}  {code}".rstrip("\\ \t")


def show(gm: GraphModule, locations: bool = False) -> str:
    """The graph as text: values renumbered v0, v1, ..., size symbols s0, s1, ... by first appearance."""
    names = _value_names(gm)
    symbols = _SymbolNames()
    device = _main_device(gm)
    inputs = [f"{names[n]}: {_type(n, symbols)}" for n in gm.graph.nodes if n.op == "placeholder"]
    lines = [f"graph({', '.join(inputs)}):"]
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            lines.append(f"  return {_return(node, names)}")
            continue
        line = f"  {names[node]}: {_type(node, symbols)} = {_expression(node, names, device)}"
        where = user_location(node) if locations else None
        lines.append(f"{line}  # {where}" if where else line)
    return "\n".join(lines) + "\n"


class _SymbolNames:
    """Size symbols renamed by appearance: torch numbers them by a hash that varies with its version."""

    def __init__(self) -> None:
        self._seen: dict[Any, Any] = {}

    def __call__(self, size: object) -> str:
        expression = getattr(getattr(size, "node", None), "expr", None)
        if expression is None:
            return str(size)
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self._seen:
                self._seen[symbol] = self._fresh(symbol)
        # Renamed before printing: sympy orders the terms of a product by name.
        return str(expression.xreplace(self._seen)).replace(" ", "")

    def _fresh(self, symbol: Any) -> Any:
        kind = str(symbol).rstrip("0123456789")
        number = sum(str(s).rstrip("0123456789") == kind for s in self._seen)
        return type(symbol)(f"{kind}{number}", **symbol.assumptions0)


def _value_names(gm: GraphModule) -> dict[Node, str]:
    names: dict[Node, str] = {}
    count = 0
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            names[node] = node.name
        elif node.op != "output":
            names[node] = f"v{count}"
            count += 1
    return names


def _main_device(gm: GraphModule) -> torch.device:
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device("cpu")


def _type(node: Node, symbols: _SymbolNames) -> str:
    layout = node.meta.get(LAYOUT_KEY)
    text = _value_type(node.meta.get("val"), symbols)
    return f"{text}@{''.join(map(str, layout))}" if layout is not None else text


def _value_type(value: object, symbols: Callable[[object], str]) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}[{','.join(symbols(s) for s in value.shape)}]"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"Sym({symbols(value)})"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_value_type(v, symbols) for v in value)})"
    return "?" if value is None else type(value).__name__


def _expression(node: Node, names: dict[Node, str], device: torch.device) -> str:
    if node.op == "get_attr":
        return f"constant({node.target})"
    if node.target is operator.getitem:
        return f"{_argument(node.args[0], names)}[{_argument(node.args[1], names)}]"
    args = [_argument(a, names) for a in node.args]
    dropped = _DROPPED_KWARGS | {("device", device)}
    for key, value in node.kwargs.items():
        if isinstance(value, (Node, list, tuple)) or (key, value) not in dropped:
            args.append(f"{key}={_argument(value, names)}")
    name = op_name(node.target) if node.op == "call_function" else f"{node.op}[{node.target}]"
    return f"{name}({', '.join(args)})"


def _argument(value: object, names: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_argument(v, names) for v in value)}]"
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, (torch.memory_format, torch.layout)):
        return str(value).removeprefix("torch.")
    if value == _INT_MAX and not isinstance(value, float):
        return "max"
    return str(value)


def _return(node: Node, names: dict[Node, str]) -> str:
    results = node.args[0]
    if isinstance(results, (list, tuple)):
        return ", ".join(_argument(r, names) for r in results)
    return _argument(results, names)

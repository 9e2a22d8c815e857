"""A graph of one call, of static sizes, that stands for a node; and what its costs are filed under."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import FakeTensorMode, fake_mode_of, quiet_shapes, size_hint
from dicp.ir.meta_keys import LAYOUT_KEY
from dicp.ir.printer import DTYPE_NAMES
from dicp.schedule.strides import dense_strides


def one_call(node: fx.Node) -> tuple[fx.GraphModule, fx.Node]:
    """The graph, and the call in it: operands are inputs that lie in memory as the node's do, sizes that vary
    are those seen while tracing, and the results are returned in the layout that the node's have."""
    graph = fx.Graph()
    mode = fake_mode_of([n.meta.get("val") for n in (node, *node.all_input_nodes)]) or FakeTensorMode()
    made: dict[fx.Node, Any] = {}
    with quiet_shapes(mode), mode:
        for k, source in enumerate(node.all_input_nodes):
            val = source.meta["val"]
            if isinstance(val, torch.Tensor):
                made[source] = graph.placeholder(f"operand{k}")
                made[source].meta["val"] = _static(val, source.meta.get(LAYOUT_KEY))
            else:
                made[source] = _number(val)
        args, kwargs = _mapped((node.args, node.kwargs), made)
        call = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        call.meta = {k: v for k, v in node.meta.items() if k != "val"}
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            call.meta["val"] = _static(val, node.meta.get(LAYOUT_KEY))
            graph.output((call,))
        else:
            call.meta["val"] = type(val)(None if v is None else _static(v) for v in val)
            graph.output(tuple(_pieces(graph, call, node)))
    return fx.GraphModule(torch.nn.Module(), graph), call


def _pieces(graph: fx.Graph, call: fx.Node, node: fx.Node) -> list[fx.Node]:
    """Those of several results that the node's graph uses."""
    numbers = sorted({u.args[1] for u in node.users if u.target is operator.getitem})  # type: ignore[type-var]
    out = []
    for k in numbers:
        out.append(graph.call_function(operator.getitem, (call, k)))
        out[-1].meta["val"] = call.meta["val"][k]
    return out


def _static(val: torch.Tensor, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """A tensor like it, of numbers for sizes, with its dims in that order in memory, or as it lies."""
    sizes = tuple(size_hint(n) for n in val.shape)
    strides = tuple(size_hint(s) for s in val.stride()) if order is None else dense_strides(sizes, order)
    return torch.empty_strided(sizes, strides, dtype=val.dtype, device=val.device)


def _number(val: Any) -> Any:
    return size_hint(val) if isinstance(val, torch.SymInt) else val


def _mapped(x: Any, made: dict[fx.Node, Any]) -> Any:
    if isinstance(x, fx.Node):
        return made[x]
    if isinstance(x, torch.SymInt):
        return size_hint(x)
    if isinstance(x, (list, tuple)):
        return type(x)(_mapped(a, made) for a in x)
    if isinstance(x, dict):
        return {k: _mapped(a, made) for k, a in x.items()}
    return x


# -- what costs are filed under ------------------------------------------------------------------------


def describe(node: fx.Node) -> str:
    """The call as text: op, operands by dtype, shape class and layout, other arguments as they are.

        dicp.linear(f32[1,1024], f32[2752,1024], None, None, 'silu')
        aten.mm(f32[~128,512], f32[512,64]'(1,512))

    ~128: a size that varies, above 64 and up to 128 when it was traced. '(..): strides, of what is not dense.
    """

    def text(x: Any) -> str:
        if isinstance(x, fx.Node):
            val = x.meta.get("val")
            layout = x.meta.get(LAYOUT_KEY)
            return tensor_text(val, layout) if isinstance(val, torch.Tensor) else _size(val)
        if isinstance(x, torch.SymInt):
            return _size(x)
        if isinstance(x, (list, tuple)):
            return f"[{', '.join(text(a) for a in x)}]"
        return repr(x)

    given = [text(a) for a in node.args] + [f"{k}={text(a)}" for k, a in node.kwargs.items()]
    layout = node.meta.get(LAYOUT_KEY)
    result = f" -> @{_digits(layout)}" if layout is not None else ""
    return f"{_name(node.target)}({', '.join(given)}){result}"


def _name(target: Any) -> str:
    return str(target).removesuffix(".default")


def tensor_text(val: torch.Tensor, order: Sequence[int] | None = None) -> str:
    """Dtype, shape class and layout."""
    sizes = ",".join(_size(n) for n in val.shape)
    text = f"{DTYPE_NAMES.get(val.dtype, str(val.dtype))}[{sizes}]"
    if order is not None:
        return f"{text}@{_digits(order)}"
    strides = [size_hint(s) for s in val.stride()]
    shape = tuple(size_hint(n) for n in val.shape)
    if tuple(strides) == dense_strides(shape, tuple(range(len(shape)))):
        return text
    if all(isinstance(s, int) for s in val.stride()):
        return f"{text}'({','.join(map(str, strides))})"
    return f"{text}@{_digits(sorted(range(len(shape)), key=lambda d: (-strides[d], d)))}"


def _digits(order: Sequence[int]) -> str:
    return "".join(map(str, order))


def _size(n: Any) -> str:
    return f"~{1 << max(size_hint(n) - 1, 0).bit_length()}" if isinstance(n, torch.SymInt) else str(n)


CompileOne = Callable[[fx.GraphModule, dict[fx.Node, Any]], Callable[[list[Any]], Any]]
"""(graph, its claims) -> the function that runs it on a (boxed) list of inputs"""

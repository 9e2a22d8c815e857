"""The gradient of an embedding table in low precision, without a float32 copy of the table
(include/dicp_embedding.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from dicp.config import Config
from dicp.ir import index as ix
from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim, dense
from dicp.vendor.cpu_graph.claims.common import dtype_of, full_args
from dicp.vendor.cpu_graph.expression import STORAGE

_LOW = (torch.bfloat16, torch.float16)
_PARAMETERS = "const {T}* grad, const {I}* index, {T}* table, const int64_t* sizes, void* lists"
_SOURCE = """\
#include "dicp_embedding.h"
using namespace dicp;

DICP_EXPORT int32_t {name}({parameters}) {{
  embedding_gradient<{onto}>(grad, index, table, sizes, (int32_t*)lists);
  return 0;
}}
"""


def embedding_backward(node: fx.Node, config: Config) -> Claim | None:
    """bf16 and fp16: generated code would add into a float32 copy of the whole table, and cast it."""
    if dtype_of(node) not in _LOW or dtype_of(node.args[0]) != dtype_of(node):
        return None
    scaled_by_frequency = node.args[4]
    if scaled_by_frequency or config.numerics == "eager":
        return None
    return Claim("embedding gradient", _emit_gradient, out=True, prepare=dense(0, 1), workspace=_list_bytes)


def add_rows(node: fx.Node, config: Config | None) -> Claim | None:
    """bf16 and fp16 likewise, over what another gradient of the table has left there."""
    if dtype_of(node) not in _LOW or dtype_of(node.args[1]) != dtype_of(node):
        return None
    return Claim(
        "embedding gradient", _emit_rows, out=True, prepare=dense(1, 2), workspace=_list_bytes, updates=True
    )


def _list_bytes(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Any:
    index = args[1] if node.target is torch.ops.aten.embedding_dense_backward.default else args[2]
    (table, _) = node.meta["val"].shape
    return (ix.product(index.shape) + lowering.index(table)) * 4


def _emit_gradient(writer: Any, call: Call) -> None:
    grad, index, _, padding, _ = full_args(call.node.target, call.args, call.kwargs)
    _emit(writer, call, grad, index, padding, onto=False)


def _emit_rows(writer: Any, call: Call) -> None:
    _, rows, index, padding = full_args(call.node.target, call.args, call.kwargs)
    _emit(writer, call, rows, index, padding, onto=True)


def _emit(writer: Any, call: Call, grad: View, index: View, padding: Any, onto: bool) -> None:
    table, lists = call.outputs
    assert table is not None and lists is not None
    sizes, _ = writer.ints([ix.product(index.shape), table.shape[1], table.shape[0], padding])
    words = {"T": STORAGE[table.dtype], "I": STORAGE[index.buffer.dtype]}
    name = f"{'add_rows' if onto else 'embedding_gradient'}_{words['T']}_{words['I']}"
    parameters = _PARAMETERS.format(**words)
    source = _SOURCE.format(name=name, parameters=parameters, onto=str(onto).lower())
    function = writer.template(name, parameters, source)
    pointers = [writer.pointer_to(grad), writer.pointer_to(index), writer.pointer(table)]
    writer.call(call, function, [*pointers, sizes, writer.pointer(lists)])


__all__ = ["add_rows", "embedding_backward"]

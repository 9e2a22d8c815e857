"""The gradient of an embedding table in low precision, without a float32 copy of the table
(include/dicp_embedding.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from dicp.ir import index as ix
from dicp.schedule.defs import Call
from dicp.vendor.base import Claim, dense
from dicp.vendor.cpu_graph.claims.common import dtype_of, full_args
from dicp.vendor.cpu_graph.expression import STORAGE

_PARAMETERS = "const {T}* grad, const {I}* index, {T}* table, const int64_t* sizes, void* lists"
_SOURCE = """\
#include "dicp_embedding.h"
using namespace dicp;

extern "C" __attribute__((visibility("default"))) int32_t {name}({parameters}) {{
  embedding_gradient(grad, index, table, sizes, (int32_t*)lists);
  return 0;
}}
"""


def embedding_backward(node: fx.Node, config: Any) -> Claim | None:
    """bf16 and fp16: generated code would add into a float32 copy of the whole table, and cast it."""
    if dtype_of(node) not in (torch.bfloat16, torch.float16) or dtype_of(node.args[0]) != dtype_of(node):
        return None
    scaled_by_frequency = node.args[4]
    if scaled_by_frequency or config.numerics == "eager":
        return None
    return Claim("embedding gradient", _emit, out=True, prepare=dense(0, 1), workspace=_list_bytes)


def _list_bytes(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Any:
    return (ix.product(args[1].shape) + lowering.index(args[2])) * 4


def _emit(writer: Any, call: Call) -> None:
    grad, index, rows, padding, _ = full_args(call.node.target, call.args, call.kwargs)
    table, lists = call.outputs
    assert table is not None and lists is not None
    sizes, _ = writer.ints([ix.product(index.shape), table.shape[1], table.shape[0], padding])
    words = {"T": STORAGE[table.dtype], "I": STORAGE[index.buffer.dtype]}
    name = f"embedding_gradient_{words['T']}_{words['I']}"
    parameters = _PARAMETERS.format(**words)
    function = writer.template(name, parameters, _SOURCE.format(name=name, parameters=parameters))
    pointers = [writer.pointer_to(grad), writer.pointer_to(index), writer.pointer(table)]
    writer.call(call, function, [*pointers, sizes, writer.pointer(lists)])


__all__ = ["embedding_backward"]

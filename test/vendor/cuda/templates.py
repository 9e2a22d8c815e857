"""Templates on tensors: interpreted, without a program around them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dicp.config import Config
from dicp.ir import index as ix
from dicp.ir.index import Index
from dicp.schedule.defs import Buffer, View
from dicp.vendor.cuda_graph import launch
from dicp.vendor.cuda_graph.assemble import programs_function
from dicp.vendor.cuda_graph.templates import Launched


def view(name: str, t: torch.Tensor, rows: Index | None = None) -> View:
    """A window on a tensor; rows: a symbol in place of its last size but one."""
    shape = tuple(t.shape) if rows is None else (*t.shape[:-2], rows, t.shape[-1])
    return View(Buffer(name, shape, t.dtype, t.stride()), shape, t.stride())


def run(
    launches: Sequence[Launched],
    tensors: dict[str, torch.Tensor],
    config: Config,
    sizes: Sequence[int] = (),
    wide: bool = False,
) -> None:
    """Run the launches in Triton's interpreter, on the tensors that the views' buffers are named after."""
    scratch = None
    for made in launches:
        if None in made.operands and scratch is None:
            scratch = torch.full((int(ix.evaluate(made.scratch, lambda a: sizes[0])),), float("nan"))
        source = made.template
        kernel = launch.InterpretedKernel(source, launch.load(source, config), programs_function(source))
        kernel(wide, *(scratch if v is None else tensors[v.buffer.name] for v in made.operands), *sizes)

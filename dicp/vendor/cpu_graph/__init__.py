"""cpu_graph: the vendor that emits C++ for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.fx as fx

from dicp.config import Config
from dicp.ir.expr import FLOAT8
from dicp.vendor.base import Claim, Convolution, ConvolutionPart, Load, Machine, Vendor, first


class CpuGraph(Vendor):
    """See dicp.vendor.base.Vendor."""

    name = "cpu_graph"
    device = "cpu"
    float8 = FLOAT8

    def available(self, config: Config) -> str | None:
        return None

    def supports(self, target: Any, node: fx.Node) -> bool:
        from dicp.vendor.cpu_graph.claims import supports

        return supports(target, node)

    def keeps(self, op: Any) -> bool:
        from dicp.vendor.cpu_graph.claims import keeps

        return keeps(op)

    def claim(self, node: fx.Node, config: Config) -> Claim | None:
        return first(self.candidates(node, config))

    def candidates(self, node: fx.Node, config: Config) -> list[Claim]:
        from dicp.vendor.cpu_graph.claims import candidates

        return candidates(node, config)

    def device_name(self, config: Config) -> str:
        from dicp.runtime.cpu import cpu_model
        from dicp.vendor.cpu_graph.toolchain import host_isa

        return f"{cpu_model()}, {host_isa(config)}"

    def aten_call(self, node: fx.Node, config: Config) -> Claim | None:
        """The op's own implementation in ATen's CPU library, called from generated code."""
        from dicp.vendor.cpu_graph.claims.dispatcher import aten_call

        return aten_call(node)

    def machine(self, config: Config) -> Machine:
        import torch

        from dicp.vendor.cpu_graph.toolchain import lanes

        pooled = config.keep_results  # libraries take from malloc
        return Machine(torch.get_num_threads(), lanes(config), device="cpu", one_allocator=not pooled)

    def matmul_pays(self, part: ConvolutionPart, conv: Convolution) -> bool:
        """Whether a convolution's result or gradient is better a matrix product (dicp.passes.conv_matmul)."""
        from dicp.vendor.cpu_graph.claims import matmul_pays

        return matmul_pays(part, conv)

    def computes_wide(self, node: fx.Node) -> bool:
        """Whether a contraction of a low precision is better computed in float32 (dicp.passes.widen)."""
        from dicp.vendor.cpu_graph.claims import computes_wide

        return computes_wide(node)

    def unfuses_bias(self, node: fx.Node) -> bool:
        """Whether a kernel better adds the bias of a product (dicp.passes.unfuse_bias)."""
        from dicp.vendor.cpu_graph.claims.matmul import unfuses_bias

        return unfuses_bias(node)

    def splits_gradients(self, node: fx.Node) -> bool:
        """Whether a convolution's gradients are better calls of their own (dicp.passes.split_backward)."""
        from dicp.vendor.cpu_graph.claims.convolution import splits_gradients

        return splits_gradients(node)

    def channels_last_gain(self, node: fx.Node) -> float:
        """Bytes, as the layout pass counts them, that a convolution spares by an algorithm which only
        channels-last has (dicp.passes.layout)."""
        from dicp.vendor.cpu_graph.claims import depthwise, separable, winograd

        return winograd.gain(node) + depthwise.gain(node) + separable.gain(node)

    def packs(self, node: fx.Node) -> str | None:
        """The form in which a constant weight is computed with."""
        from dicp.vendor.cpu_graph.packing import packs

        return packs(node)

    def pack(self, weight: Any, form: str) -> Any:
        """The weight in that form."""
        from dicp.vendor.cpu_graph.packing import pack

        return pack(weight, form)

    def ceilings(self, dtype: torch.dtype) -> tuple[list[Load], Load]:
        """What shows the most that the processor can do (dicp.bench)."""
        from dicp.vendor.cpu_graph import ceilings

        return ceilings.arithmetic(dtype), ceilings.reading()

    def fingerprint(self, config: Config) -> str:
        from dicp.vendor.cpu_graph import toolchain
        from dicp.vendor.cpu_graph.build import compiler_identity
        from dicp.vendor.cpu_graph.claims import cpu_maker
        from dicp.vendor.cpu_graph.claims.common import FLOATS, LOW, multiplies
        from dicp.vendor.cpu_graph.microkernels import available

        compiler = compiler_identity(config)
        parts = (sorted(toolchain.environment_parts().items()), toolchain.flags(config, compiler).code)
        has = [[multiplies(dtype) for dtype in LOW], [available(dtype) for dtype in FLOATS]]
        return repr((*parts, compiler, cpu_maker(), has))

    def warm_up(self, gm: fx.GraphModule, config: Config) -> None:
        from dicp.vendor.cpu_graph.speculative_build import build_speculatively

        build_speculatively(gm, config)

    def begin(self, lowered: Any, config: Config) -> AbstractContextManager[Any]:
        """Compile templates while the core schedules kernels and plans memory."""
        from dicp.vendor.cpu_graph.assemble import begin

        return begin(lowered, config)

    def assemble(self, program: Any, config: Config) -> Callable[[list[Any]], Any]:
        from dicp.vendor.cpu_graph.assemble import assemble

        return assemble(program, config)

    def load(self, artifact: Any, config: Config) -> Callable[[list[Any]], Any]:
        from dicp.vendor.cpu_graph.saved import load

        return load(artifact, config)


vendor = CpuGraph()

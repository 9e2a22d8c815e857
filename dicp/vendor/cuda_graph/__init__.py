"""cuda_graph: the vendor that emits Triton for CUDA GPUs, and replays whole programs as CUDA graphs."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from dicp.config import Config
from dicp.ir.expr import FLOAT8
from dicp.vendor.base import Claim, Convolution, ConvolutionPart, Load, Machine, Vendor, first


def gpu(threads: int) -> Machine:
    """As scheduling sees a GPU.

    Columns are reduced by blocks of 64 over at least as many rows; four blocks for each multiprocessor fill
    the chip, and what they leave is small to read again: on an H200, 8,192x8,192 elements of bfloat16 are
    read at 90 % of a copy's bandwidth so, at 82 in four times as many blocks. The rows that are worked on at
    a time are read again from L2, which has 50 MB on an H100."""
    return Machine(
        threads,
        lanes=64,
        split_columns=512,
        most_pieces=8 * threads,
        least_piece=64,
        most_results=4,
        most_columns=1,
        launch_bytes=4 << 20,
        shared_row=1 << 18,
    )


class CudaGraph(Vendor):
    """See dicp.vendor.base.Vendor. With `interpret` it serves CPU tensors through Triton's interpreter."""

    name = "cuda_graph"
    device = "cuda"
    float8 = FLOAT8

    def available(self, config: Config) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return (
                "Triton is not installed; install the one that belongs to your torch, "
                "or use backend='dicp_cpu'"
            )
        if config.interpret or torch.cuda.is_available():
            return None
        return (
            "torch sees no CUDA GPU; use backend='dicp_cpu' on this machine, or DICP_CUDA_INTERPRET=1 "
            "to run the kernels on CPU tensors through Triton's interpreter (for tests: slow)"
        )

    def warm_up(self, gm: fx.GraphModule, config: Config) -> None:
        if not (config.interpret or config.no_compile):
            from dicp.vendor.cuda_graph.launch import warm_up

            warm_up()

    def supports(self, target: Any, node: fx.Node) -> bool:
        from dicp.vendor.cuda_graph.claims import supports

        return supports(target, node)

    def keeps(self, op: Any) -> bool:
        from dicp.vendor.cuda_graph.claims import keeps

        return keeps(op)

    def claim(self, node: fx.Node, config: Config) -> Claim | None:
        return first(self.candidates(node, config))

    def candidates(self, node: fx.Node, config: Config) -> list[Claim]:
        from dicp.vendor.cuda_graph.claims import candidates

        return candidates(node, config)

    def matmul_pays(self, part: ConvolutionPart, conv: Convolution) -> bool:
        """Whether a convolution's result or gradient is better a matrix product (dicp.passes.conv_matmul)."""
        from dicp.vendor.cuda_graph.convolution import matmul_pays

        return matmul_pays(part, conv)

    def padded_channels(self, node: fx.Node) -> int | None:
        """To how many channels a convolution's input is better filled up (dicp.passes.pad_channels)."""
        from dicp.vendor.cuda_graph.convolution import padded_channels

        return padded_channels(node)

    def unfuses_bias(self, node: fx.Node) -> bool:
        """Whether a kernel better adds the bias of an addmm (dicp.passes.unfuse_bias)."""
        from dicp.vendor.cuda_graph.products import unfuses_bias

        return unfuses_bias(node)

    def device_name(self, config: Config) -> str:
        """What timings depend on: the GPU's model, or that there is none."""
        return "interpreter" if config.interpret else str(torch.cuda.get_device_name())

    def clock(self, config: Config) -> Callable[[Callable[[], None]], float]:
        from dicp.tuning.timing import on_host
        from dicp.vendor.cuda_graph.clock import GpuClock

        return on_host if config.interpret else GpuClock()

    def machine(self, config: Config) -> Machine:
        if config.interpret:
            return Machine(torch.get_num_threads(), device="cpu")
        if not torch.cuda.is_available():
            return Machine(torch.get_num_threads())
        # A row is a block, and four rows a thread are wanted: one block for each multiprocessor. A power of
        # two, because it has to divide what is split.
        quarter = max(torch.cuda.get_device_properties().multi_processor_count // 4, 1)
        return dataclasses.replace(gpu(1 << quarter.bit_length() - 1), device="cuda")

    def ceilings(self, dtype: torch.dtype) -> tuple[list[Load], Load]:
        """A large product, and a copy, of which each byte is read and written (dicp.bench)."""
        n = 8192
        a, b, out = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(3))
        source, target = (torch.empty(1 << 29, dtype=torch.uint8, device="cuda") for _ in range(2))
        product = Load(lambda: torch.mm(a, b, out=out), 2 * n**3)
        return [product], Load(lambda: target.copy_(source), 2 * source.nbytes)

    def fingerprint(self, config: Config) -> str:
        import triton

        gpus = sorted({torch.cuda.get_device_capability(k) for k in range(torch.cuda.device_count())})
        float32 = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
        return f"triton {triton.__version__} cuda {torch.version.cuda} {gpus} float32 {float32}"

    def assemble(self, program: Any, config: Config) -> Callable[[list[Any]], Any]:
        from dicp.vendor.cuda_graph.assemble import assemble

        return assemble(program, config)


vendor = CudaGraph()

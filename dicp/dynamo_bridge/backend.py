"""The backends that torch.compile finds: dicp_cpu, dicp_cuda, and dicp (by the inputs' device)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

CPU, CUDA = "cpu_graph", "cuda_graph"


def dicp_cpu(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile for the CPU. Raises OptionError for an unknown mode or option, and what compile_graph raises.
    """
    return _compile(CPU, gm, example_inputs, mode, options)


def dicp_cuda(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile for CUDA GPUs."""
    return _compile(CUDA, gm, example_inputs, mode, options)


def dicp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile for the device that the inputs are on."""
    from dicp.vendor import for_device

    device = next((x.device.type for x in example_inputs if isinstance(x, torch.Tensor)), "cpu")
    return _compile(for_device(device).name, gm, example_inputs, mode, options)


def _compile(
    vendor_name: str,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: dict[str, Any] | None,
) -> Callable[..., Any]:
    from dicp import vendor as vendors
    from dicp.config import Config
    from dicp.dynamo_bridge.aot import compile_joint
    from dicp.errors import DicpError

    config = Config.make(mode, options)
    vendor = vendors.get(vendor_name)
    problem = vendor.available(config)
    if problem is not None:
        raise DicpError(f"{vendor_name} cannot run here: {problem}")
    return compile_joint(gm, example_inputs, vendor, config)


__all__ = ["dicp", "dicp_cpu", "dicp_cuda"]

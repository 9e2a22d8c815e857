"""The backends that torch.compile finds: dicp_cpu, dicp_cuda, and dicp (by the inputs' device); and
backend_for, which makes one of any vendor."""

from __future__ import annotations

import functools
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
    return _compile(_vendor(CPU), gm, example_inputs, mode, options)


def dicp_cuda(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile for CUDA GPUs."""
    return _compile(_vendor(CUDA), gm, example_inputs, mode, options)


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
    return _compile(for_device(device), gm, example_inputs, mode, options)


@functools.cache
def backend_for(vendor: Any) -> Callable[..., Any]:
    """The backend of a vendor, for `torch.compile(model, backend=...)`: one and the same at each call.

    vendor: the name of an installed one, or the vendor itself. A name is looked up here, and loaded at the
    first compile. Raises DicpError, naming near matches, when none of that name is installed.
    """
    if isinstance(vendor, str):
        from dicp.vendor import find

        find(vendor)
    else:
        from dicp.vendor.asking import require_whole

        require_whole(vendor)

    def backend(
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        found = _vendor(vendor) if isinstance(vendor, str) else vendor
        return _compile(found, gm, example_inputs, mode, options)

    backend.__name__ = vendor if isinstance(vendor, str) else vendor.name
    return backend


def _vendor(name: str) -> Any:
    from dicp.vendor import get

    return get(name)


def _compile(
    given: Any,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: dict[str, Any] | None,
) -> Callable[..., Any]:
    from dicp.config import Config
    from dicp.dynamo_bridge.aot import compile_joint
    from dicp.dynamo_bridge.constant_masks import fold_masks
    from dicp.errors import DicpError, VendorError
    from dicp.vendor import require_one
    from dicp.vendor.asking import asked, remedy

    require_one(given.name)
    config, vendor = Config.make(mode, options), asked(given)
    problem = vendor.available(config)
    if problem is not None and not isinstance(problem, str):
        what = f"{vendor.name}.available gave {problem!r}, which is neither None nor a text that says why not"
        raise VendorError(what, todo=remedy(vendor))
    if problem:
        raise DicpError(f"{vendor.name} cannot run here: {problem}")
    if config.numerics != "eager":
        fold_masks(gm)
    vendor.warm_up(gm, config)
    return compile_joint(gm, example_inputs, vendor, config)


__all__ = ["backend_for", "dicp", "dicp_cpu", "dicp_cuda"]

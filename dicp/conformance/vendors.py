"""Which backend name a vendor answers to, and where its tensors live."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dicp.vendor.base import AnyVendor

SHIPPED = {"cpu_graph": "dicp_cpu", "cuda_graph": "dicp_cuda"}


def backend_of(vendor: str) -> str:
    """The `torch.compile` backend of a vendor: what ships under that name, or the vendor's own `backend`, or
    the vendor's name.
    """
    return SHIPPED.get(vendor) or _vendor(vendor).backend or vendor


def device_of(vendor: str) -> str:
    """The torch type of the device that a vendor's programs take tensors of here."""
    from dicp.config import Config
    from dicp.vendor.base import takes_graphs

    found = _vendor(vendor)
    device = None if takes_graphs(found) else found.machine(Config.make()).device
    return str(device or found.device)


def require_backend(name: str, modules: Sequence[str]) -> None:
    """SystemExit where torch knows no such backend, once these modules are imported."""
    import torch

    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as e:
            raise SystemExit(f"--import {module}: {e}") from e
    if name not in torch.compiler.list_backends(exclude_tags=()):
        raise SystemExit(
            f"torch knows no backend {name!r}: a package has to name it under the entry-point group "
            "torch_dynamo_backends, or a module given to --import to register it"
        )


def _vendor(name: str) -> AnyVendor:
    from dicp.errors import DicpError
    from dicp.vendor import get, names
    from dicp.vendor.asking import asked

    if name not in names():
        known = ", ".join(sorted({*names(), *SHIPPED}))
        raise SystemExit(
            f"no vendor named {name!r}; there are {known}. For any torch.compile backend: --backend NAME"
        )
    try:
        return asked(get(name))
    except DicpError as e:
        raise SystemExit(str(e)) from e

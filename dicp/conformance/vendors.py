"""Which backend name a vendor answers to."""

from __future__ import annotations

from importlib.metadata import entry_points

SHIPPED = {"cpu_graph": "dicp_cpu", "cuda_graph": "dicp_cuda"}


def backend_of(vendor: str) -> str:
    """The `torch.compile` backend of a vendor: what ships under that name, or the vendor's own `backend`, or
    the vendor's name.
    """
    if vendor in SHIPPED:
        return SHIPPED[vendor]
    found = {e.name: e for e in entry_points(group="dicp.vendors")}
    if vendor in found:
        return str(getattr(found[vendor].load(), "backend", vendor))
    known = sorted(found.keys() | SHIPPED)
    raise SystemExit(
        f"no vendor named {vendor!r}; there are {', '.join(known)}. For any other torch.compile backend: "
        "--backend NAME"
    )

"""Which backend name a vendor answers to."""

from __future__ import annotations

from importlib.metadata import entry_points

SHIPPED = {"cpu_graph": "dicp_cpu", "cuda_graph": "dicp_cuda"}


def backend_of(vendor: str) -> str:
    """The `torch.compile` backend of a vendor: the registered one's own word, or what ships under that
    name.
    """
    for entry in entry_points(group="dicp.vendors"):
        if entry.name == vendor:
            name = getattr(entry.load(), "backend", None)
            if isinstance(name, str):
                return name
    if vendor in SHIPPED:
        return SHIPPED[vendor]
    known = sorted({e.name for e in entry_points(group="dicp.vendors")} | set(SHIPPED))
    raise SystemExit(
        f"no vendor named {vendor!r}; there are {', '.join(known)}. For any other torch.compile backend: "
        "--backend NAME"
    )

"""`python -m dicp.info [--json]`: what dicp finds on this machine, for bug reports and for a first look."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import dicp


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _vendors(config: Any) -> dict[str, str]:
    """Each installed vendor: "ready", or what it lacks."""
    from dicp import vendor as vendors
    from dicp.errors import VendorError
    from dicp.vendor.asking import asked

    found = {}
    for name in vendors.names():
        try:
            found[name] = asked(vendors.get(name)).available(config) or "ready"
        except VendorError as error:
            found[name] = error.what
    return found


def collect() -> dict[str, Any]:
    """Everything that is printed, as plain data."""
    import torch

    from dicp.config import Config
    from dicp.errors import OptionError
    from dicp.runtime.cache import default_root
    from dicp.runtime.cpu import cpu_name
    from dicp.vendor.cpu_graph import toolchain

    try:
        config, wrong = Config.make(None, None), {}
    except OptionError as e:
        config, wrong = Config(), {"environment": e.what}
    tools, problem = toolchain.find(config)
    return {
        "dicp": dicp.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "os": platform.platform(),
        "cpu": cpu_name(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": toolchain.host_isa(config),
        "compiler": f"{' '.join(tools.command)} ({tools.identity})" if tools else f"none: {problem}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "vendors": _vendors(config),
        "cache": str(default_root(config)),
        **wrong,
    }


def main(argv: list[str] | None = None) -> int:
    args = sys.argv[1:] if argv is None else argv
    if args not in ([], ["--json"]):
        print("usage: python -m dicp.info [--json]", file=sys.stderr)
        return 2
    found = collect()
    if args:
        print(json.dumps(found, indent=1))
        return 0
    for key, value in found.items():
        if isinstance(value, dict):
            print(f"{key}:")
            for name, text in value.items():
                print(f"  {name:<14} {text}")
        else:
            print(f"{key + ':':<16} {'-' if value is None else value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

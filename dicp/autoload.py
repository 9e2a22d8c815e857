"""Called by `import torch` (entry point `torch.backends`): makes the log name "dicp" known to TORCH_LOGS."""

from __future__ import annotations


def register() -> None:
    """Register the log. Imports nothing that torch has not loaded by then."""
    from torch._logging._internal import log_registry, register_log

    if "dicp" not in log_registry.log_alias_to_log_qnames:
        register_log("dicp", "dicp")

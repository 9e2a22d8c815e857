"""Called by `import torch` (entry point `torch.backends`): makes known to torch what it looks up by name.

The log name "dicp" (TORCH_LOGS), and the kind "dicp" of what `torch.compiler.save_cache_artifacts` carries: a
process that loads such artifacts has no other reason to import dicp.
"""

from __future__ import annotations

ARTIFACT = "dicp"


def register() -> None:
    """Register the log and the artifact type. Imports nothing heavy."""
    from torch._logging._internal import log_registry, register_log

    if "dicp" not in log_registry.log_alias_to_log_qnames:
        register_log("dicp", "dicp")
    register_artifact()


def register_artifact() -> None:
    """Register the artifact type: one entry of the build cache, by its key."""
    from torch.compiler._cache import CacheArtifact, CacheArtifactFactory

    if ARTIFACT in CacheArtifactFactory._artifact_types:
        return

    class UnitArtifact(CacheArtifact):
        def populate_cache(self) -> None:
            from dicp.runtime.artifact import place_unit

            place_unit(self.content)

        @staticmethod
        def type() -> str:
            return ARTIFACT

    CacheArtifactFactory.register(UnitArtifact)

"""A pytest plugin (`-p emulated_avx512`) under which dicp takes this CPU for one with AVX-512: vectors of 16 are
emitted, and what is chosen by the CPU's features is chosen for such a CPU, without bf16 instructions.
`scripts/emulate_avx512.sh` adds the compiler that emulates what this one lacks. Libraries see the CPU that is there."""

from __future__ import annotations

import pytest
import torch

from dicp.vendor.cpu_graph import toolchain

AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}

has = toolchain.cpu_flags()
if not {"avx2", "fma", "f16c"} <= has:
    raise SystemExit("AVX-512 is emulated with AVX2, which this processor lacks")
wide = frozenset(flag for flag in has if not flag.startswith("avx512")) | AVX512

# before other modules import them by name
toolchain.cpu_flags = lambda: wide  # type: ignore[assignment]
torch.backends.cpu.get_cpu_capability = lambda: "AVX512"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nothing is said of the instructions themselves."""
    for item in items:
        if item.name == "test_vectors_stay_in_registers":
            item.add_marker(pytest.mark.skip(reason="emulated vectors have other registers"))

"""What Linux tells of the processor."""

from __future__ import annotations

import functools
import platform
from pathlib import Path


@functools.cache
def _words() -> dict[str, str]:
    """The lines of /proc/cpuinfo about its first processor; none on other systems."""
    words = {}
    try:
        with Path("/proc/cpuinfo").open(errors="replace") as f:
            for line in f:
                name, _, value = line.partition(":")
                if not name.strip():
                    break
                words[name.strip()] = value.strip()
    except OSError:
        return {}
    return words


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Feature words as Linux spells them; empty where unknown."""
    return frozenset((_words().get("flags") or _words().get("Features") or "").split())


@functools.cache
def cpu_maker() -> str:
    """ "amd", "intel" or "other"."""
    return {"AuthenticAMD": "amd", "GenuineIntel": "intel"}.get(_words().get("vendor_id", ""), "other")


def pairs_are_slow() -> bool:
    """Whether the instruction for pairs of bf16 multiplies at half the rate of float32's, as on Intel's
    processors: 172 GFLOP/s for 347 (two cores of the 5th generation, `dicp.bench`'s ceilings). With AMX there
    is another way."""
    return cpu_maker() == "intel" and "amx_bf16" not in cpu_flags()


def halves_are_slow() -> bool:
    """Whether oneDNN computes with float16 at half the rate of float32, as on Intel's processors without AMX
    for it: convolutions at 160 to 180 GFLOP/s for 260 to 330 (two cores of the 5th generation, one-off
    script)."""
    return cpu_maker() == "intel" and "amx_fp16" not in cpu_flags()


def cpu_name() -> str:
    """The name that it is sold under."""
    return _words().get("model name") or platform.processor() or platform.machine()


def cpu_model() -> str:
    """That, with the numbers of the model where Linux tells them: makers sell many under one name."""
    known = [_words()[k] for k in ("model name", "cpu family", "model", "stepping") if k in _words()]
    return " ".join(known) or cpu_name()


__all__ = ["cpu_flags", "cpu_maker", "cpu_model", "cpu_name", "halves_are_slow", "pairs_are_slow"]

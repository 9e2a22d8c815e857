"""How many compiler processes may run at once: affinity, cgroup quota and free memory decide."""

from __future__ import annotations

import math
import os
from pathlib import Path

COMPILE_JOB_BYTES = 300 << 20  # resident peak of one g++ on a generated unit is 60-200 MiB


def worker_count(
    per_job_bytes: int = COMPILE_JOB_BYTES,
    override: int | None = None,
    proc: Path = Path("/proc"),
    cgroup: Path = Path("/sys/fs/cgroup"),
) -> int:
    """Parallel jobs this process may start, at least 1.  `override` (the `workers` option) wins."""
    if override is not None:
        return max(1, override)
    cpus: float = _affinity()
    quota = cpu_quota(proc, cgroup)
    if quota is not None:
        cpus = min(cpus, quota)
    # the ranks of one machine share its CPUs, and torchrun sets no affinity
    jobs = math.ceil(cpus / max(1, _int(os.environ.get("LOCAL_WORLD_SIZE", "1")) or 1))
    memory = free_memory(proc, cgroup)
    if memory is not None:
        jobs = min(jobs, memory // max(1, per_job_bytes))
    return max(1, jobs)


def cpu_quota(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs the tightest enclosing cgroup grants (v2 `cpu.max`, v1 `cpu.cfs_*`), None when unlimited."""
    limits = []
    for folder in _cgroup_folders(proc, cgroup, "cpu"):
        v2 = _read(folder / "cpu.max").split()
        if len(v2) == 2 and (quota := _int(v2[0])) and (period := _int(v2[1])):
            limits.append(quota / period)
        quota_us, period_us = (
            _int(_read(folder / "cpu.cfs_quota_us")),
            _int(_read(folder / "cpu.cfs_period_us")),
        )
        if quota_us and quota_us > 0 and period_us:
            limits.append(quota_us / period_us)
    return min(limits, default=None)


def free_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can be allocated before the machine or a cgroup runs out, None when unknown."""
    frees = []
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            frees.append(int(line.split()[1]) * 1024)
    for folder in _cgroup_folders(proc, cgroup, "memory"):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _int(_read(folder / limit_file)), _int(_read(folder / used_file))
            if limit is not None and used is not None and limit < 1 << 60:  # v1 spells "no limit" as 2**63
                frees.append(max(0, limit - used + _page_cache(folder)))
    return min(frees, default=None)


def _page_cache(folder: Path) -> int:
    """Bytes of a cgroup's usage the kernel gives back under pressure."""
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return _int(value) or 0
    return 0


def _cgroup_folders(proc: Path, cgroup: Path, controller: str) -> list[Path]:
    """This process's cgroup folder and all its parents, for v2 and for one v1 controller."""
    folders = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        if parts[1] == "":
            base = cgroup
        elif controller in parts[1].split(","):
            base = cgroup / controller if (cgroup / controller).is_dir() else cgroup / parts[1]
        else:
            continue
        here = base / parts[2].strip("/")
        while here != base and base in here.parents:
            folders.append(here)
            here = here.parent
        folders.append(base)
    return folders


def _affinity() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _int(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None

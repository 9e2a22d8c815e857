from __future__ import annotations

import os
from pathlib import Path

import pytest

from dicp.runtime.workers import cpu_quota, free_memory, worker_count

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    write(tmp_path / "proc/meminfo", f"MemTotal: 999 kB\nMemAvailable: {64 * GIB // 1024} kB\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def count(machine: Path, per_job_bytes: int = GIB) -> int:
    return worker_count(per_job_bytes, proc=machine / "proc", cgroup=machine / "cgroup")


def test_affinity_bounds(machine: Path) -> None:
    assert count(machine) == 16


def test_override_wins(machine: Path) -> None:
    assert worker_count(override=3, proc=machine / "proc", cgroup=machine / "cgroup") == 3


def test_memory_bounds_and_one_worker_remains(machine: Path) -> None:
    assert count(machine, per_job_bytes=16 * GIB) == 4
    assert count(machine, per_job_bytes=999 * GIB) == 1


def test_ranks_share_the_cpus(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert count(machine) == 2


def test_cgroup_v2_quota_of_any_ancestor(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/outer/inner\n")
    write(machine / "cgroup/outer/inner/cpu.max", "max 100000\n")
    write(machine / "cgroup/outer/cpu.max", "250000 100000\n")
    assert cpu_quota(machine / "proc", machine / "cgroup") == 2.5
    assert count(machine) == 3


def test_cgroup_v2_memory_counts_page_cache_as_free(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/\n")
    write(machine / "cgroup/memory.max", str(4 * GIB))
    write(machine / "cgroup/memory.current", str(3 * GIB))
    assert free_memory(machine / "proc", machine / "cgroup") == GIB
    write(machine / "cgroup/memory.stat", f"anon 1\ninactive_file {2 * GIB}\n")
    assert free_memory(machine / "proc", machine / "cgroup") == 3 * GIB
    assert count(machine) == 3


def test_cgroup_v1(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "4:cpu,cpuacct:/job\n3:memory:/job\n")
    write(machine / "cgroup/cpu/job/cpu.cfs_quota_us", "500000")
    write(machine / "cgroup/cpu/job/cpu.cfs_period_us", "100000")
    write(machine / "cgroup/memory/job/memory.limit_in_bytes", str(1 << 63))  # v1's "unlimited"
    write(machine / "cgroup/memory/job/memory.usage_in_bytes", "0")
    assert cpu_quota(machine / "proc", machine / "cgroup") == 5
    assert free_memory(machine / "proc", machine / "cgroup") == 64 * GIB
    write(machine / "cgroup/cpu/job/cpu.cfs_quota_us", "-1")
    assert cpu_quota(machine / "proc", machine / "cgroup") is None


def test_no_proc_at_all(machine: Path) -> None:
    assert worker_count(proc=machine / "none", cgroup=machine / "none") == 16

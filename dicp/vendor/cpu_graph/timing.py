"""DICP_DEBUG=2: time and bandwidth of every step of a program, printed when the process ends."""

from __future__ import annotations

import atexit
import ctypes
import sys


def report_at_exit(program: str, labels: list[tuple[str, int]], times_address: int) -> None:
    """Print totals at exit, dearest first. `times_address`: a function that returns the array of
    nanoseconds."""
    times = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_int64))(times_address)

    def report() -> None:
        values = times()
        rows = sorted(((values[k], label, moved) for k, (label, moved) in enumerate(labels)), reverse=True)
        total = sum(r[0] for r in rows) or 1
        print(f"dicp: {program}: {total / 1e6:.1f} ms in {len(rows)} steps", file=sys.stderr)
        grouped: dict[str, list[int]] = {}
        for ns, label, moved in rows:
            entry = grouped.setdefault(label, [0, 0, 0])
            entry[0] += ns
            entry[1] += moved
            entry[2] += 1
        for label, (ns, moved, count) in sorted(grouped.items(), key=lambda g: -g[1][0]):
            print(
                f"  {ns / 1e6:9.2f} ms {100 * ns / total:5.1f} %  x{count:<3} "
                f"{moved / 2**20:8.1f} MiB a call  {label}",
                file=sys.stderr,
            )

    atexit.register(report)

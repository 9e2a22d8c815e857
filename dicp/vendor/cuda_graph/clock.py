"""How long the GPU takes for calls, without what the host takes to make them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from dicp.compat import keep_gpu_busy

MARGIN = 1.5  # times as long as the calls took the host
MOST_S = 0.02  # a call that compiles takes the host long, and no later one
TRIES = 3


class GpuClock:
    """Seconds between events around calls. The GPU is kept busy while the host makes them, so that they
    follow one another as in a CUDA graph; where that was too short, they are made again behind a longer
    wait. hidden: whether it was long enough in the last measurement, whose host time is in it otherwise."""

    def __init__(self) -> None:
        self.busy_s, self.hidden = 2e-3, True

    def __call__(self, work: Callable[[], None]) -> float:
        seconds = 0.0
        for _ in range(TRIES):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begun = time.perf_counter()
            keep_gpu_busy(self.busy_s)
            start.record()
            work()
            end.record()
            self.hidden, host_s = not start.query(), time.perf_counter() - begun
            end.synchronize()
            seconds = start.elapsed_time(end) / 1e3
            if self.hidden:
                break
            self.busy_s = min(MARGIN * host_s, MOST_S)
        return seconds


__all__ = ["GpuClock"]

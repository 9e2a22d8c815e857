"""The clock for calls on a GPU, with stand-ins for the GPU."""

from __future__ import annotations

import time

import pytest
import torch

from dicp.vendor.cuda_graph import clock


class Event:
    """Of a GPU that is done with its wait as soon as `waits` says: one entry for each measurement."""

    waits: list[bool] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return not Event.waits.pop(0)

    def elapsed_time(self, end: Event) -> float:
        return 3.0  # ms


@pytest.mark.parametrize(("waits", "tries"), [([True], 1), ([False, True], 2), ([False] * 3, 3)])
def test_calls_that_the_gpu_did_not_wait_for_are_made_again(
    waits: list[bool], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy: list[float] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(clock, "keep_gpu_busy", busy.append)
    Event.waits = list(waits)
    made: list[int] = []
    measure = clock.GpuClock()

    def work() -> None:
        made.append(1)
        time.sleep(3e-3)

    assert measure(work) == 3e-3 and measure.hidden == any(waits)
    assert len(made) == len(busy) == tries
    assert all(b > 3e-3 for b in busy[1:]) and busy[0] < 3e-3
    Event.waits = [True]
    measure(work)
    assert busy[-1] == measure.busy_s, "what was long enough is remembered"
    Event.waits = [False, True]
    measure(lambda: time.sleep(0.05))
    assert busy[-1] == clock.MOST_S, "a call that compiles is not waited for ever after"


def test_interpreted_calls_are_timed_on_the_host() -> None:
    from dicp.config import Config
    from dicp.tuning.timing import on_host
    from dicp.vendor.cuda_graph import vendor

    assert vendor.clock(Config.make(options={"interpret": True})) is on_host
    assert isinstance(vendor.clock(Config.make()), clock.GpuClock)

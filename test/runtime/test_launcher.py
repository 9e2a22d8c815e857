from __future__ import annotations

import ctypes
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dicp.config import Config
from dicp.vendor.cpu_graph import launching
from dicp.vendor.cpu_graph.build import Library, Unit, build
from dicp.vendor.cpu_graph.launching import bind, get_launcher

SOURCE = r"""
#define EXPORT extern "C" __attribute__((visibility("default")))
typedef long i64;
extern "C" int usleep(unsigned);
EXPORT i64 weigh3(const i64* a) { return a[0] + 10 * a[1] + 100 * a[2]; }
EXPORT i64 weigh2000(const i64* a) {
  i64 s = 0;
  for (i64 i = 0; i < 2000; ++i) s += (i + 1) * a[i];
  return s;
}
EXPORT i64 same(const i64* a) { return a[0]; }
EXPORT i64 nothing(const i64*) { return 7; }
EXPORT i64 rest(const i64* a) { usleep(a[0]); return 0; }
EXPORT i64 peek(const i64* a) { return *(const i64*)a[0]; }
"""

Launch = Callable[..., int]
Bind = Callable[[int, int], Callable[..., int]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return build([Unit("calls", SOURCE)], config(tmp_path_factory.getbasetemp()))


def config(folder: Path) -> Config:
    return Config.make(None, {"cache_dir": str(folder / "launcher_cache")})


@pytest.fixture(params=["native", "ctypes"])
def calls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Launch, Bind]:
    if request.param == "ctypes":
        return launching._ctypes_launch, launching._ctypes_bind
    settings = config(tmp_path_factory.getbasetemp())
    launch = get_launcher(settings)
    assert launch is not launching._ctypes_launch, "the native launcher did not build"
    return launch, lambda fn, n: bind(fn, n, settings)


def test_values(calls: tuple[Launch, Bind], library: Library) -> None:
    launch, bind = calls
    weigh = library.address("weigh3")
    assert launch(weigh, 1, 2, 3) == bind(weigh, 3)(1, 2, 3) == 321
    same = library.address("same")
    for value in (0, 1, 2**31, 2**30 - 1, 2**30, 2**60 - 1, 2**60, 2**62, 2**63 - 1):
        for signed in (value, -value, -value - 1):
            assert launch(same, signed) == bind(same, 1)(signed) == signed
    assert launch(same, True) == 1
    assert launch(library.address("nothing")) == bind(library.address("nothing"), 0)() == 7
    cell = ctypes.c_int64(12345)
    assert launch(library.address("peek"), ctypes.addressof(cell)) == 12345


@pytest.mark.parametrize("how", ["launch", "bind"])
def test_many_arguments(how: str, calls: tuple[Launch, Bind], library: Library) -> None:
    launch, bind = calls
    address = library.address("weigh2000")
    numbers = list(range(2000))
    expected = sum((i + 1) * i for i in numbers)
    assert (launch(address, *numbers) if how == "launch" else bind(address, 2000)(*numbers)) == expected


def test_wrong_calls_raise(calls: tuple[Launch, Bind], library: Library) -> None:
    launch, bind = calls
    same = library.address("same")
    bound = bind(same, 1)
    for wrong in ((), (1, 2)):
        with pytest.raises(TypeError, match="expected 1 integers"):
            bound(*wrong)
    for value in (1.5, "1", None):
        with pytest.raises(TypeError):
            launch(same, value)
        with pytest.raises(TypeError):
            bound(value)


def test_native_refuses_overflow_null_and_keywords(
    library: Library, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = config(tmp_path_factory.getbasetemp())
    launch, same = get_launcher(settings), library.address("same")
    with pytest.raises(OverflowError):
        launch(same, 2**63)
    with pytest.raises(ValueError, match="address is 0"):
        launch(0, 1)
    with pytest.raises(ValueError, match="address is 0"):
        bind(0, 1, settings)
    with pytest.raises(TypeError, match="keyword"):
        bind(same, 1, settings)(a=1)
    with pytest.raises(TypeError):
        launch()
    with pytest.raises(TypeError, match="cannot create"):
        type(bind(same, 1, settings))()


def test_the_gil_is_released(calls: tuple[Launch, Bind], library: Library) -> None:
    launch, _ = calls
    rest = library.address("rest")
    threads = [threading.Thread(target=lambda: launch(rest, 200_000)) for _ in range(5)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.perf_counter() - start < 0.7, "five rests of 0.2 s ran one after the other"


def test_no_references_leak(library: Library, tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = config(tmp_path_factory.getbasetemp())
    launch, same = get_launcher(settings), library.address("same")
    big = 2**50 + 1
    before = sys.getrefcount(big)
    for _ in range(1000):
        launch(same, big)
        bind(same, 1, settings)(big)
    kind = type(bind(same, 1, settings))
    gc.collect()
    types_before = sys.getrefcount(kind)
    for _ in range(1000):
        bind(same, 1, settings)
    assert sys.getrefcount(big) == before
    assert abs(sys.getrefcount(kind) - types_before) < 5


@pytest.mark.parametrize("lack", ["headers", "compiler"])
def test_falls_back_to_ctypes(
    lack: str, library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launching._launching.cache_clear()
    if lack == "headers":
        monkeypatch.setattr(launching.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    else:
        monkeypatch.setenv("DICP_CXX", "no-such-compiler")
    with caplog.at_level(logging.INFO, logger="dicp.build"):
        assert get_launcher() is launching._ctypes_launch
        assert get_launcher()(library.address("weigh3"), 1, 2, 3) == 321
        assert bind(library.address("weigh3"), 3)(1, 2, 3) == 321
    assert sum("no native launcher" in r.message for r in caplog.records) == 1
    launching._launching.cache_clear()

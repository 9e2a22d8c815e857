"""Launching, with a stand-in for libcuda: what arrives at cuLaunchKernel."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget

from dicp.config import Config
from dicp.errors import DicpError
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Var
from dicp.ir.kernel import Axis, Kernel, Param, Store
from dicp.vendor.cuda_graph import codegen, launch, launching
from dicp.vendor.cuda_graph.assemble import programs_function


class FakeLibrary:
    """Records launches: (grid, threads, arguments as 64-bit words)."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.loaded, self.launches = code, 0, []
        self.context, self.entered = 0, []
        self.capture_mode = 1  # of the thread: thread-local

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.context
        return 0

    def cuDeviceGet(self, handle: Any, device: int) -> int:
        handle._obj.value = device
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, handle: Any) -> int:
        context._obj.value = 1000 + handle.value
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.context = context.value
        self.entered.append(context.value)
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.capture_mode, mode._obj.value = mode._obj.value, self.capture_mode
        return 0

    def cuModuleLoadData(self, module: Any, binary: bytes) -> int:
        assert self.capture_mode == 2  # relaxed: a graph may be under capture
        assert binary[:4] == b"\x7fELF"
        self.loaded += 1
        return 0

    def cuModuleGetFunction(self, *args: Any) -> int:
        return 0

    def cuLaunchKernel(
        self,
        function: Any,
        gx: int,
        gy: int,
        gz: int,
        bx: int,
        by: int,
        bz: int,
        shared: int,
        stream: Any,
        params: Any,
        extra: Any,
    ) -> int:
        words = [ctypes.c_uint64.from_address(p).value for p in params]
        if not self.context:
            return 201
        self.launches.append(((gx, gy, gz), bx, words))
        return self.code

    def cuGetErrorString(self, code: int, text: Any) -> int:
        return 1


class Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


class NativeLibrary(FakeLibrary):
    """The same, which has a cuLaunchKernelEx as well: native code to who calls it."""

    def __init__(self) -> None:
        super().__init__()
        pointer = ctypes.c_void_p
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Configuration), pointer, pointer, pointer)
        self.parameters, self.streams, self.early = 0, list[int](), list[bool]()

        def record(configuration: Any, function: Any, arguments: Any, _: Any) -> int:
            if not self.context:
                return 201
            how = configuration.contents
            places = (ctypes.c_void_p * self.parameters).from_address(arguments)
            found = [ctypes.c_uint64.from_address(p).value for p in places]
            self.launches.append((tuple(how.grid), how.block[0], found))
            self.streams.append(how.stream)
            words = (ctypes.c_int * 3).from_address(how.attributes)
            assert (words[0], words[2]) == (6, 1)  # programmatic stream serialization: allowed
            self.early.append(how.count == 1)
            return self.code

        self.cuLaunchKernelEx = kind(record)

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = 77
        return 0


def doubled(size: int | None = None) -> Kernel:
    n = Var("n", None, 1)
    i = Var("i", ix.of(n) if size is None else size)
    x = Expr("load", ("x", ix.of(i)), torch.float32)
    return Kernel(
        "double",
        (Axis(i),),
        (Param("x", torch.float32, False), Param("y", torch.float32, True, False)),
        (n,) if size is None else (),
        (Store("y", ix.of(i), x + x),),
    )


@pytest.fixture
def kernel(cuda_cache: str) -> tuple[launch.GpuKernel, FakeLibrary]:
    config, library = Config.make(options={"cache_dir": cuda_cache}), FakeLibrary()
    source = codegen.emit(doubled())
    made = launch.GpuKernel(
        source,
        launch.load(source, config),
        programs_function(source),
        find_driver=lambda: launch.Driver(library),
        find_target=lambda d: GPUTarget("cuda", 90, 32),
    )
    return made, library


def test_arguments_arrive_in_order_with_scratch_behind(kernel: Any) -> None:
    call, library = kernel
    call(0, 5, False, 4096, 8192, 5000)
    ((grid, threads, words),) = library.launches
    assert grid == (-(-5000 // call.source.blocks.x), 1, 1)
    assert threads == 32 * call.source.blocks.warps
    assert words[:3] == [4096, 8192, 5000]
    assert not any(words[3:])


def test_variants_by_alignment_width_and_device(kernel: Any) -> None:
    call, library = kernel
    call(0, 5, False, 4096, 8192, 5000)
    call(0, 5, False, 4096, 8192, 5000)
    assert library.loaded == 1 and library.capture_mode == 1
    call(0, 5, False, 4100, 8192, 5000)
    call(0, 5, True, 4096, 8192, 5000)
    call(1, 5, False, 4096, 8192, 5000)
    call(0, 5, False, 4096, 8192, 5008)
    assert library.loaded == 5


def test_nothing_to_do_launches_nothing(kernel: Any) -> None:
    call, library = kernel
    call(0, 5, False, 4096, 8192, 0)
    assert not library.launches


def test_a_failing_launch_is_an_error_with_the_kernels_name(kernel: Any) -> None:
    call, library = kernel
    library.code = 700
    with pytest.raises(DicpError, match="700.*double"):
        call(0, 5, False, 4096, 8192, 64)


def test_a_thread_without_a_context_enters_the_devices(kernel: Any) -> None:
    call, library = kernel
    call(1, 5, False, 4096, 8192, 64)
    assert library.entered == [1001]
    library.context = 0  # another thread
    call(1, 5, False, 4096, 8192, 64)
    assert library.entered == [1001, 1001] and len(library.launches) == 2


def test_triton_is_warmed_up_once_and_beside_what_compiles(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    with caplog.at_level(logging.DEBUG, "dicp"):
        thread = launch.warm_up()
        assert launch.warm_up() is thread
        thread.join(60)
    assert not thread.is_alive() and "not warm" not in caplog.text


@pytest.fixture
def native(cuda_cache: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, NativeLibrary, list[int]]:
    """What a program calls of a kernel of 5000 elements, and the devices of launches that went through Python."""
    config, library = Config.make(options={"cache_dir": cuda_cache}), NativeLibrary()
    source = codegen.emit(doubled(5000))
    slow: list[int] = []
    made = launch.GpuKernel(
        source,
        launch.load(source, config),
        programs_function(source),
        find_driver=lambda: launch.Driver(library),
        find_target=lambda d: GPUTarget("cuda", 90, 32),
    )
    made.prepare(0)
    library.parameters, library.context = made.launchers[0, True, False, False].total, 1000
    library.entered.clear()
    plain = launch.Launcher.__call__

    def noting(self: launch.Launcher, *args: Any) -> None:
        slow.append(self.device)
        plain(self, *args)

    monkeypatch.setattr(launch.Launcher, "__call__", noting)
    call = made.launching()
    assert call is not made and made.launching() is call
    return call, library, slow


def test_a_grid_that_does_not_vary_is_launched_without_python(native: Any) -> None:
    call, library, slow = native
    call(0, 5, False, 1 << 40, 8192)
    call(0, 7, False, 4096, 8192)
    assert not slow and library.streams == [5, 7]
    (grid, threads, words), (_, _, others) = library.launches
    assert grid[1:] == (1, 1) and grid[0] > 1 and threads % 32 == 0
    assert words[:2] == [1 << 40, 8192] and others[:2] == [4096, 8192]
    assert len(words) > 2 and not any(words[2:])  # scratch memory behind the arguments


def test_a_kernel_is_launched_while_the_one_before_runs_unless_told_to_be_alone(native: Any) -> None:
    call, library, slow = native
    for how in (False, 0, launch.ALONE, launch.WIDE_POSITIONS, launch.WIDE_POSITIONS | launch.ALONE):
        call(0, 5, how, 4096, 8192)
    assert slow == [0] and library.early == [True, True, False, False]  # wide ones are made by Python first
    call(0, 5, launch.WIDE_POSITIONS, 4096, 8192)
    assert library.early[-1] and len(library.launches) == 6


def test_variants_that_it_does_not_know_are_made_and_then_known(native: Any) -> None:
    call, library, slow = native
    for device, wide, x in ((0, False, 4100), (0, True, 4096), (1, False, 4096)):
        before = library.loaded
        call(device, 5, wide, x, 8192)
        assert slow.pop() == device and library.loaded == before + 1
        call(device, 5, wide, x, 8192)
        assert not slow and library.loaded == before + 1
        assert library.launches[-1] == library.launches[-2]


def test_devices_beyond_its_table_are_launched_by_python(native: Any) -> None:
    call, library, slow = native
    call(16, 5, False, 4096, 8192)
    call(16, 5, False, 4096, 8192)
    assert slow == [16, 16] and library.launches[0] == library.launches[1]


def test_a_native_launch_that_fails_is_told_or_mended_by_python(native: Any) -> None:
    call, library, slow = native
    library.context = 0  # another thread
    call(0, 5, False, 4096, 8192)
    assert slow == [0] and library.entered == [1000] and len(library.launches) == 1
    library.code = 700
    with pytest.raises(DicpError, match="700.*double"):
        call(0, 5, False, 4096, 8192)
    for wrong in ((0, 5, False, 4096), (0, 5, False, 4096, "8192"), (0, None, False, 4096, 8192)):
        with pytest.raises((TypeError, ValueError)):
            call(*wrong)


def test_without_a_compiler_python_launches(cuda_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr("triton.runtime.build.compile_module_from_src", fail)
    launching._module.cache_clear()
    source, driver = codegen.emit(doubled(5000)), launch.Driver(NativeLibrary())
    fn = launch.load(source, Config.make(options={"cache_dir": cuda_cache}))
    made = launch.GpuKernel(source, fn, programs_function(source), find_driver=lambda: driver)
    try:
        assert made.launching() is made
    finally:
        launching._module.cache_clear()


def test_a_kernel_and_what_launches_it_are_collected(cuda_cache: str) -> None:
    """They know each other."""
    config, library = Config.make(options={"cache_dir": cuda_cache}), NativeLibrary()
    source = codegen.emit(doubled(5000))
    driver, fn = launch.Driver(library), launch.load(source, config)
    made = launch.GpuKernel(source, fn, programs_function(source), find_driver=lambda: driver)
    call, kernel = made.launching(), weakref.ref(made)
    assert call is not made
    del made, call
    gc.collect()
    assert kernel() is None

"""Launching, with a stand-in for libcuda: what arrives at cuLaunchKernel."""

from __future__ import annotations

import ctypes
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
from dicp.vendor.cuda_graph import codegen, launch
from dicp.vendor.cuda_graph.assemble import programs_function


class FakeLibrary:
    """Records launches: (grid, threads, arguments as 64-bit words)."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.loaded, self.launches = code, 0, []
        self.context, self.entered = 0, []

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

    def cuModuleLoadData(self, module: Any, binary: bytes) -> int:
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


def doubled() -> Kernel:
    n = Var("n", None, 1)
    i = Var("i", ix.of(n))
    x = Expr("load", ("x", ix.of(i)), torch.float32)
    return Kernel(
        "double",
        (Axis(i),),
        (Param("x", torch.float32, False), Param("y", torch.float32, True, False)),
        (n,),
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
    assert library.loaded == 1
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

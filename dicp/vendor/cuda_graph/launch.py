"""Emitted kernels as callables: loading, compiling for a GPU (present or not), launching, interpreting.

A kernel is compiled through Triton for what a launch finds: pointers aligned to 16 bytes or not, 32- or
64-bit positions, sizes that 16 divides or not. It is launched by the driver's cuLaunchKernel, by native code
(launching.py) where its grid does not vary, without Triton's own launcher: that one builds a C extension per
signature and looks each argument up in every call.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dicp.config import Config
from dicp.errors import BuildError, DicpError
from dicp.ir.expr import FLOAT8
from dicp.ir.kernel import Param
from dicp.runtime.cache import Key, open_store
from dicp.vendor.cuda_graph import launching

POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    **dict.fromkeys(FLOAT8, "*u8"),
}
WIDE = 1 << 30  # elements from which positions take 64 bits (a last tile may reach beyond the end)
ALIGN = 16  # bytes: one vector access
WIDE_POSITIONS, ALONE = 1, 2
"""How a launch is: with positions of 64 bits; not before all that comes before has ended."""
EARLY_PROGRAMS = 8192
"""Of a kernel that is launched early. Each of them waits, which costs more than it brings where they are
many: two matrices side by side, by 131,072 programs, took 128 us on an H200 and 159 when these waited."""
log = logging.getLogger("dicp")
_loading = threading.Lock()
_interpreting = threading.Lock()


class Source(Protocol):
    """An emitted kernel: module.Source, or a template."""

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def params(self) -> tuple[Param, ...]: ...
    @property
    def sizes(self) -> tuple[str, ...]: ...
    @property
    def constants(self) -> dict[str, int]: ...
    @property
    def warps(self) -> int: ...
    @property
    def stages(self) -> int | None: ...
    @property
    def registers(self) -> int | None: ...
    @property
    def contracted(self) -> bool: ...
    @property
    def checks(self) -> bool: ...
    @property
    def grid(self) -> str: ...
    @property
    def origins(self) -> tuple[str, ...]: ...


def load(source: Source, config: Config) -> Any:
    """The Triton function of an emitted module, which is kept in the build cache."""
    key = Key.of(source=source.text, kind="triton")

    def write(folder: Path) -> None:
        (folder / f"{source.name}.py").write_text(source.text)

    folder = open_store(config).get_or_build(key, write, source.name)
    return load_file(folder / f"{source.name}.py", source.name)


@functools.lru_cache(maxsize=4096)
def load_file(path: Path, name: str) -> Any:
    """The Triton function `name` of a module file."""
    unique = "dicp_triton_" + hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _loading:
        spec.loader.exec_module(module)
    return getattr(module, name)


# -- compiling -----------------------------------------------------------------------------------------------


def compile_for(
    source: Source,
    fn: Any,
    target: GPUTarget,
    aligned: bool = True,
    wide: bool = False,
    round_sizes: bool = False,
    fusion: bool = True,
) -> Any:
    """A kernel compiled for a GPU, down to its binary; no GPU is needed. Raises BuildError."""
    signature = {p.name: POINTERS[p.dtype] for p in source.params}
    signature |= dict.fromkeys(source.sizes, "i64" if wide else "i32")
    if source.checks:
        signature["flags"] = "*i32"
    constants = _constants(source, wide, aligned) | {"PDL": waits_itself(source, target)}
    signature |= dict.fromkeys(constants, "constexpr")
    hint = [["tt.divisibility", ALIGN]]
    attrs = {(k,): hint for k in range(len(source.params))} if aligned else {}
    if round_sizes:
        attrs |= {(len(source.params) + k,): hint for k in range(len(source.sizes))}
    options = {"num_warps": source.warps, "enable_fp_fusion": fusion and source.contracted}
    options |= {} if source.stages is None else {"num_stages": source.stages}
    options |= {} if source.registers is None else {"maxnreg": source.registers}
    try:
        return triton.compile(
            ASTSource(fn, signature, constants, attrs),
            target=target,
            options=options | {"enable_reflect_ftz": False},  # libdevice's subnormal numbers are eager's
        )
    except (triton.CompilationError, RuntimeError, ValueError) as e:
        raise BuildError(
            f"Triton cannot compile {source.name} for {target.backend}:{target.arch}",
            message=str(e)[:4000],
            source=str(getattr(fn.fn, "__code__", fn).co_filename),
            where=source.origins,
        ) from e


def _constants(source: Source, wide: bool, aligned: bool) -> dict[str, Any]:
    """Of a variant: a vector is one element where some buffer begins at no whole one."""
    single = {"V": 1} if "V" in source.constants and not aligned else {}
    return {"INDEX": tl.int64 if wide else tl.int32, "PDL": False} | source.constants | single


def waits_itself(source: Source, target: GPUTarget) -> bool:
    """Whether a kernel can be launched while the one before it runs, and waits for it by itself
    ("programmatic dependent launch")."""
    if target.arch < 90 or source.sizes:
        return False
    return 0 < int(eval(source.grid)) <= EARLY_PROGRAMS


@functools.cache
def target_of(device: int) -> GPUTarget:
    major, minor = torch.cuda.get_device_capability(device)
    return GPUTarget("cuda", major * 10 + minor, 32)


@triton.jit
def _nothing() -> None:
    return


@functools.cache
def warm_up() -> threading.Thread:
    """Have Triton read what its first compile in a process takes (all of its own library, for the keys of its
    cache), and the launcher built, while Python still traces."""

    def compile_nothing() -> None:
        try:
            triton.compile(ASTSource(_nothing, {}, {}), target=GPUTarget("cuda", 90, 32))
        except Exception as e:  # of no consequence here: the kernels that follow say what is wrong
            log.debug("Triton is not warm: %s", e)
        launching.prepare()

    thread = threading.Thread(target=compile_nothing, name="dicp-warm-up")
    thread.start()
    return thread


# -- the driver ----------------------------------------------------------------------------------------------


class Driver:
    """The few calls of libcuda that a launch needs. `library` may be a stand-in."""

    SHARED_LIMIT, MAX_DYNAMIC_SHARED = 48 << 10, 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    INVALID_CONTEXT, RELAXED = 201, 2  # CU_STREAM_CAPTURE_MODE_RELAXED

    def __init__(self, library: Any) -> None:
        self.library = library
        self.launch_kernel = library.cuLaunchKernel

    @property
    def launch_address(self) -> int | None:
        """That of cuLaunchKernelEx, where the driver has it, as native code."""
        try:
            return ctypes.cast(self.library.cuLaunchKernelEx, ctypes.c_void_p).value
        except (AttributeError, TypeError, ctypes.ArgumentError):  # CUDA 11.7 and before; a stand-in's method
            return None

    def enter(self, device: int) -> None:
        """Have this thread use the device's primary context, which is torch's, unless it has one: a new
        thread that made no call of CUDA's runtime yet has none."""
        context, handle = ctypes.c_void_p(), ctypes.c_int()
        self._checked(self.library.cuCtxGetCurrent(ctypes.byref(context)), "asking for the context")
        if context.value:
            return
        self._checked(self.library.cuDeviceGet(ctypes.byref(handle), device), f"opening device {device}")
        self._checked(
            self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "retaining the context"
        )
        self._checked(self.library.cuCtxSetCurrent(context), "entering the context")

    def load(self, binary: bytes, name: str, shared: int, device: int) -> ctypes.c_void_p:
        """The function in a binary, ready to launch on the device, which is the current one. May be called
        while a graph is captured, which forbids what takes memory unless the thread says that it knows."""
        mode = ctypes.c_int(self.RELAXED)
        self.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            return self._load(binary, name, shared, device)
        finally:
            self.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def _load(self, binary: bytes, name: str, shared: int, device: int) -> ctypes.c_void_p:
        self.enter(device)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._checked(self.library.cuModuleLoadData(ctypes.byref(module), binary), f"loading {name}")
        self._checked(
            self.library.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"finding {name}"
        )
        if shared > self.SHARED_LIMIT:
            self._checked(
                self.library.cuFuncSetAttribute(function, self.MAX_DYNAMIC_SHARED, shared),
                f"{shared} bytes of shared memory for {name}",
            )
        return function

    def _checked(self, code: int, what: str) -> None:
        if code:
            raise DicpError(f"CUDA error {code} while {what}: {self.message(code)}")

    def message(self, code: int) -> str:
        text = ctypes.c_char_p()
        self.library.cuGetErrorString(code, ctypes.byref(text))
        return (text.value or b"unknown error").decode()


@functools.cache
def driver() -> Driver:
    torch.cuda.init()
    library = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    return Driver(library)


class Launcher:
    """One compiled binary on one device: fills the argument slots and launches."""

    def __init__(self, compiled: Any, arguments: int, drv: Driver, device: int, waits: bool = False) -> None:
        meta = compiled.metadata
        self.waits = waits
        self.driver, self.name, self.device = drv, meta.name, device
        self.launch = drv.launch_kernel
        self.function = drv.load(compiled.kernel, meta.name, meta.shared, device)
        self.threads, self.shared = meta.num_warps * 32, meta.shared
        self.total = total = arguments + hidden_parameters(compiled.asm["ptx"], meta.name, arguments)
        self.slots = (ctypes.c_uint64 * max(1, total))()
        base = ctypes.addressof(self.slots)
        self.pointers = (ctypes.c_void_p * max(1, total))(*(base + 8 * k for k in range(total)))
        self.count = arguments
        self.lock = threading.Lock()

    @property
    def binary(self) -> tuple[int, int, int, int, bool]:
        """The function's handle, threads of a program, bytes of shared memory, parameters, whether it waits
        for the kernel before by itself."""
        return self.function.value or 0, self.threads, self.shared, self.total, self.waits

    def __call__(self, programs: int, stream: int, arguments: Sequence[int]) -> None:
        with self.lock:
            self.slots[: self.count] = arguments  # type: ignore[call-overload]
            block = (self.threads, 1, 1, self.shared, stream, self.pointers, None)
            code = self.launch(self.function, programs, 1, 1, *block)
            if code == Driver.INVALID_CONTEXT:
                self.driver.enter(self.device)
                code = self.launch(self.function, programs, 1, 1, *block)
        if code:
            raise DicpError(f"CUDA error {code} launching {self.name}: {self.driver.message(code)}")


def hidden_parameters(ptx: str, name: str, arguments: int) -> int:
    """Parameters (scratch memory) that Triton adds behind those of the source."""
    start = ptx.index(f".entry {name}(")
    return ptx[start : ptx.index(")", start + len(name) + 8)].count(".param") - arguments


class GpuKernel:
    """A kernel as the program calls it: kernel(device, stream, how, pointers.., sizes..), how:
    WIDE_POSITIONS, ALONE, or the sum of them."""

    def __init__(
        self,
        source: Source,
        fn: Any,
        programs: Callable[..., int],
        fusion: bool = True,
        find_driver: Callable[[], Driver] = driver,
        find_target: Callable[[int], GPUTarget] = target_of,
    ) -> None:
        self.source, self.fn, self.programs, self.fusion = source, fn, programs, fusion
        self.find_driver, self.find_target = find_driver, find_target
        self.n_pointers = len(source.params)
        self.always = None if source.sizes else programs()
        """Programs of a launch, where no size varies."""
        self.launchers: dict[tuple[int, bool, bool, bool], Launcher] = {}
        self.lock = threading.Lock()
        self.native: Any = None

    def launching(self) -> Callable[..., None]:
        """What the program calls: this, or a native launcher that knows this kernel's variants."""
        address = None if self.always is None else self.find_driver().launch_address
        if self.native is None and self.always and address is not None:
            count = self.n_pointers + self.source.checks
            self.native = launching.native(address, self, self.n_pointers, count, self.always)
            for key, launcher in self.launchers.items():
                self._note(key, launcher)
        return self if self.native is None else self.native  # type: ignore[no-any-return]

    def _note(self, key: tuple[int, bool, bool, bool], launcher: Launcher) -> None:
        if self.native is not None:
            self.native.note(*key[:3], *launcher.binary)

    def __call__(self, device: int, stream: int, how: int, *arguments: int) -> None:
        n, programs, low, whole = self.n_pointers, self.always, 0, False
        for p in arguments[:n]:
            low |= p
        if programs is None:
            sizes = arguments[n : n + len(self.source.sizes)]
            programs, whole = self.programs(*sizes), not any(s % ALIGN for s in sizes)
        if programs == 0:
            return
        key = (device, not low % ALIGN, bool(how & WIDE_POSITIONS), whole)
        launcher = self.launchers.get(key)
        if launcher is None:
            launcher = self.prepare(*key)
        launcher(programs, stream, arguments)

    def prepare(
        self, device: int, aligned: bool = True, wide: bool = False, round_sizes: bool = False
    ) -> Launcher:
        """Compile (Triton's cache keeps what another process compiled) and load."""
        target = self.find_target(device)
        compiled = compile_for(self.source, self.fn, target, aligned, wide, round_sizes, self.fusion)
        with self.lock:
            key = (device, aligned, wide, round_sizes)
            if key not in self.launchers:
                count = self.n_pointers + len(self.source.sizes) + self.source.checks
                waits = waits_itself(self.source, target)
                self.launchers[key] = Launcher(compiled, count, self.find_driver(), device, waits)
                self._note(key, self.launchers[key])
            return self.launchers[key]


# -- the interpreter -----------------------------------------------------------------------------------------


class InterpretedKernel:
    """A kernel run by Triton's interpreter on CPU tensors: kernel(wide, tensors.., sizes..)."""

    def __init__(self, source: Source, fn: Any, programs: Callable[..., int]) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        from dicp.vendor.cuda_graph.emulate import namespace

        self.source, self.programs = source, programs
        plain = fn.fn
        space = {"tl": tl, "triton": triton, "d": namespace(), "range": _range, "__name__": source.name}
        self.run = InterpretedFunction(
            types.FunctionType(plain.__code__, space, plain.__name__, plain.__defaults__)
        )
        self.run.fn.__annotations__ = dict(plain.__annotations__)

    def __call__(self, wide: bool, *arguments: Any) -> None:
        n = len(self.source.params)
        programs = self.programs(*arguments[n : n + len(self.source.sizes)])
        if programs == 0:
            return
        pointers = [t.view(torch.uint8) if t.dtype in FLOAT8 else t for t in arguments[:n]]
        constants = _constants(self.source, wide, not any(t.data_ptr() % ALIGN for t in pointers))
        with _interpreting, np.errstate(all="ignore"):  # the interpreter swaps functions of triton.language
            self.run[(programs,)](*pointers, *arguments[n:], **constants)


def _range(*bounds: Any) -> range:
    """range over what the interpreter holds sizes in: arrays of one element."""
    return range(*(int(b.handle.data.item()) if isinstance(b, tl.tensor) else b for b in bounds))


# -- alone ---------------------------------------------------------------------------------------------------


def try_alone(fn: Any, example: dict[str, Any]) -> None:
    """Run an emitted module on random inputs and time it; without a GPU, compile it for one and say so."""
    if not torch.cuda.is_available():
        print(f"{fn.__name__}: no GPU here; the module is sound Python. Sizes: {example['buffers']}")
        return
    generator = torch.Generator(device="cuda").manual_seed(0)

    def make(dtype: str, n: int) -> torch.Tensor:
        kind = getattr(torch, dtype)
        if kind.is_floating_point:
            return torch.randn(n, device="cuda", generator=generator).to(kind)
        return torch.randint(0, 2, (n,), device="cuda", generator=generator).to(kind)

    tensors = [make(dtype, n) for dtype, n, _ in example["buffers"]]
    extra = [torch.zeros(64, dtype=torch.int32, device="cuda")] if example["flags"] else []
    arguments = (*tensors, *example["sizes"], *extra)
    options = dict(example["constants"], INDEX=tl.int32, PDL=False, num_warps=example["warps"])
    options |= {"num_stages": example["stages"]} if "stages" in example else {}
    options |= {"maxnreg": example["registers"]} if "registers" in example else {}

    def once() -> None:
        fn[(example["programs"],)](*arguments, **options)

    once()
    moved = sum(t.numel() * t.element_size() for t in tensors)
    ms = triton.testing.do_bench(once)
    print(f"{fn.__name__}: {ms * 1e3:.1f} us, {moved / ms / 1e6:.0f} GB/s counting each buffer once")
    for (dtype, n, written), t in zip(example["buffers"], tensors, strict=True):
        if written:
            print(f"  wrote {dtype}[{n}]: {t[:4].tolist()} ...")

"""The C++ compiler, its identity, and the flags for this machine's vector instructions.

Linking against the 434 MB libtorch_cpu.so takes ld 0.2 s per unit. The 8 KB libtorch.so names it as its own
dependency, so a library linked to that one finds the same symbols when it is loaded, in 0.01 s; what ld
cannot see it must then not complain about, and a misspelt symbol shows when the library is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Literal, get_args

from dicp.config import Config
from dicp.errors import OptionError, ToolchainError
from dicp.runtime.cpu import cpu_flags
from dicp.runtime.entry import content_hash

log = logging.getLogger("dicp.build")

INCLUDE = Path(__file__).parent / "include"
LANES = {"avx512": 16, "avx2": 8, "portable": 4}  # fp32 lanes of one vector

INSTALL = (
    "install one (apt-get install g++ | dnf install gcc-c++ | conda install cxx-compiler), "
    "or set DICP_CXX to a C++17 compiler"
)
Effort = Literal["full", "exact", "light", "none"]
"""How much the compiler optimises: all it can; that, but for contractions of products and sums, each copy of
an expression having another (of a*a + b*b either product may be rounded, so that no element of a kernel's
equals the largest that another found); what code of whole vectors needs whose loops are unrolled by
its own word, in about half of the time (for g++: what clang makes of that was not measured); or nothing, for
code without loops, where optimising takes longer than it can save."""
EFFORTS: tuple[Effort, ...] = get_args(Effort)
# Without -fpeel-loops, g++ leaves loops as they are that `#pragma GCC unroll` is before: UNet took 460 ms for
# 280; without -fexpensive-optimizations it contracts nothing. Generated kernels (interleaved stores of rotary
# embeddings, pools), attention, products of few rows and depthwise gradients are slower with so little.
# With -O2, a quarter of the compilers' time less, small windows stay loops: a gradient of avg_pool3d took
# 0.68 ms for 0.32.
_LEVELS: dict[Effort, tuple[str, ...]] = {
    "full": ("-O3",),
    "exact": ("-O3",),
    "light": ("-O1", "-fpeel-loops", "-fexpensive-optimizations"),
    "none": ("-O0",),
}
_COMMON = ("-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden")
# no -ffast-math: it breaks inf and NaN; errno and FP traps nobody reads; integers wrap as in torch
_MATH = ("-fno-math-errno", "-fno-trapping-math", "-fwrapv")
_QUIET = ("-w", "-Wno-psabi")
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mpopcnt")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512cd")
_AVX512_EXTRA = {  # /proc/cpuinfo flag -> compiler flag
    "avx512_bf16": "-mavx512bf16",
    "avx512_fp16": "-mavx512fp16",
    "avx512_vnni": "-mavx512vnni",
    "avx512vbmi": "-mavx512vbmi",
}


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """A C++ compiler: how to call it, and what tells it from another one."""

    command: tuple[str, ...]
    identity: str  # version line | target machine | its own arguments: equal where the compiler is the same


@dataclasses.dataclass(frozen=True)
class Flags:
    """Compiler arguments: those that shape the code (part of every key), and machine-dependent paths."""

    isa: str
    code: tuple[str, ...]
    link: tuple[str, ...]


# -- the compiler


def find(config: Config, memory: Path | None = None) -> tuple[Toolchain | None, str]:
    """The compiler and "", or None and why there is none.

    `memory` is a folder where identities are kept by the compiler's path, size and time, so that a later
    process need not run the compiler to ask.
    """
    wanted = [config.cxx] if config.cxx else ["g++", "c++", "clang++"]
    reason = f"no C++ compiler: looked for {', '.join(wanted)}"
    for name in wanted:
        command = shlex.split(name)
        path = shutil.which(command[0]) if command else None
        if path is None:
            continue
        stamp = _stamp(path, command)
        identity = _recall(memory).get(stamp)
        if identity is None:
            try:
                identity = _ask(path, command[1:])
            except (OSError, subprocess.SubprocessError) as e:
                reason = f"the C++ compiler {path} does not work: {e}"
                continue
            _remember(memory, stamp, identity)
        own = [shlex.join(command[1:])] if command[1:] else []
        return Toolchain((path, *command[1:]), " | ".join([identity, *own])), ""
    return None, reason


def missing(reason: str) -> ToolchainError:
    """The error for a build that is needed where there is no compiler."""
    return ToolchainError(reason, todo=INSTALL)


def lacks_openmp(output: str) -> bool:
    """Whether a linker says, in GNU's words or LLVM's, that clang's OpenMP runtime is not installed."""
    return any(words in output for words in ("cannot find -lomp", "unable to find library -lomp"))


def missing_openmp(compiler: str) -> ToolchainError:
    """The error for a clang++ that is installed without its OpenMP runtime."""
    return ToolchainError(
        f"{compiler} has no OpenMP runtime (libomp)",
        todo="install it (apt-get install libomp-dev | dnf install libomp-devel), or set DICP_CXX to g++",
    )


def _ask(path: str, extra: list[str]) -> str:
    def run(flag: str) -> str:
        done = subprocess.run(
            [path, *extra, flag],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout.strip()

    version = run("--version").splitlines()
    if not version:
        raise subprocess.SubprocessError("it does not tell its version")
    return f"{version[0]} | {run('-dumpmachine')}"


def _stamp(path: str, command: list[str]) -> str:
    real = os.path.realpath(path)
    info = os.stat(real)
    return shlex.join([real, *command[1:], str(info.st_size), str(info.st_mtime_ns)])


def _recall(memory: Path | None) -> dict[str, str]:
    if memory is None:
        return {}
    try:
        found = json.loads((memory / "toolchains.json").read_text())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}


def _remember(memory: Path | None, stamp: str, identity: str) -> None:
    """Note a compiler as the latest used; a cache that cannot be written just forgets."""
    if memory is None:
        return
    known = _recall(memory)
    known.pop(stamp, None)
    known = dict([*known.items(), (stamp, identity)][-16:])
    with contextlib.suppress(OSError):
        fresh = memory / f"toolchains.{os.getpid()}.tmp"
        fresh.write_text(json.dumps(known, indent=1))
        os.replace(fresh, memory / "toolchains.json")


# -- the machine


def host_isa(config: Config) -> str:
    """The vector instructions to emit: those torch uses here, unless the `isa` option names others."""
    has = cpu_flags()
    can = ["portable"]
    if {"avx2", "fma", "f16c"} <= has:
        can.append("avx2")
        if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= has:
            can.append("avx512")
    if config.isa == "auto":
        import torch  # here, so that listing or verifying a cache does not import torch

        name = torch.backends.cpu.get_cpu_capability().lower()
        return name if name in can else "portable"
    if config.isa not in can:
        raise OptionError(f"isa {config.isa!r}: this CPU offers only {', '.join(can)}", todo="use isa='auto'")
    return config.isa


def cpu_words(flags: Flags) -> tuple[str, ...]:
    """Feature words that a CPU must have to run code built with these flags."""
    words = {"portable": (), "avx2": ("avx2", "fma", "f16c")}.get(flags.isa)
    if words is None:
        words = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd")
    return (*words, *(word for word, flag in _AVX512_EXTRA.items() if flag in flags.code))


def lanes(config: Config) -> int:
    """fp32 lanes of one vector of generated code."""
    return LANES[host_isa(config)]


def flags(config: Config, identity: str = "", effort: Effort = "full") -> Flags:
    """Arguments for one unit, without source and output; `identity` tells clang from gcc."""
    from dicp.compat import e4m3_overflow  # here, as torch in `host_isa`

    isa = host_isa(config)
    contract = "off" if config.numerics == "eager" or effort == "exact" else "fast"
    clang = "clang" in identity
    level = _LEVELS["full" if clang and effort == "light" else effort]
    code = [*level, *_COMMON, *_MATH, *_QUIET]
    code += [f"-ffp-contract={contract}", f"-DDICP_LANES={LANES[isa]}"]
    code.append(f"-DDICP_E4M3_OVERFLOW={e4m3_overflow():#x}")
    if isa != "portable":
        code += _AVX2
    if isa == "avx512":
        code += _AVX512
        code += [
            flag for word, flag in _AVX512_EXTRA.items() if word in cpu_flags() and _knows(flag, identity)
        ]
    return Flags(isa, tuple(code), _link_flags(clang))


def _knows(flag: str, identity: str) -> bool:
    """Whether the compiler is new enough for an instruction set; only fp16 is younger than C++17."""
    if flag != "-mavx512fp16":
        return True
    version = identity.partition(" | ")[0].split()
    major = next((w.split(".")[0] for w in reversed(version) if w[:1].isdigit() and "." in w), "0")
    return int(major) >= (14 if "clang" in identity else 12)


def _link_flags(clang: bool) -> tuple[str, ...]:
    lib = torch_lib()
    torch_so = next((lib / n for n in ("libtorch.so", "libtorch_cpu.so") if (lib / n).exists()), None)
    gomp = bundled_gomp()
    link = ["-Wl,--no-as-needed"]
    if torch_so is not None:
        link.append(str(torch_so))
    if clang or gomp is None:  # clang's code calls its own OpenMP runtime; the default link finds it
        return (*link, "-Wl,--unresolved-symbols=ignore-all", f"-Wl,-rpath,{lib}")
    return (
        *link,
        str(gomp),  # the pool torch has running: by its soname the loader takes the one already there
        "-nodefaultlibs",  # libstdc++ and libgcc_s come through libtorch; reading them costs ld 0.03 s
        "-Wl,--as-needed",
        "-lm",
        "-lc",
        "-lgcc",
        "-Wl,--unresolved-symbols=ignore-all",
        f"-Wl,-rpath,{lib}",
    )


@functools.lru_cache(maxsize=1)
def torch_lib() -> Path:
    """Folder of torch's shared libraries."""
    import torch

    return Path(torch.__file__).parent / "lib"


@functools.lru_cache(maxsize=1)
def bundled_gomp() -> Path | None:
    """The OpenMP runtime torch ships, None when it uses the system's."""
    for folder in (torch_lib(), torch_lib().parent.parent / "torch.libs"):
        if found := sorted(folder.glob("libgomp*.so*")):
            return found[0]
    return None


@functools.lru_cache(maxsize=1)
def environment_parts() -> dict[str, str]:
    """Key parts that hold for every unit of this process: torch, dicp, machine, and the headers."""
    import torch

    import dicp

    headers = b"".join(
        p.name.encode() + b"\0" + p.read_bytes() for p in sorted(INCLUDE.glob("*")) if p.is_file()
    )
    return {
        "torch": torch.__version__,
        "dicp": str(getattr(dicp, "__version__", "0")),
        "machine": platform.machine(),
        "headers": content_hash(headers),
    }

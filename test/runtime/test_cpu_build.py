from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dicp.config import Config
from dicp.errors import BuildError, NoCompileError, OptionError, ToolchainError
from dicp.runtime import cache
from dicp.vendor.cpu_graph import toolchain
from dicp.vendor.cpu_graph.build import Build, Library, Unit, build

EXPORT = 'extern "C" __attribute__((visibility("default"))) '
ROOT = Path(__file__).parents[2]
GXX = shutil.which("g++") or ""
pytestmark = pytest.mark.skipif(not GXX, reason="needs g++")


def unit(name: str, value: int, extra: str = "") -> Unit:
    source = f"// {name}\n{extra}\n{EXPORT}long {name}(const long*) {{ return {value}; }}\n"
    return Unit(name, source, (f"model.py:{value}  y = {name}(x)",))


def call(library: Library, symbol: str) -> int:
    result: int = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(library.address(symbol))(None)
    return result


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.make(None, {"cache_dir": str(tmp_path / "c"), "workers": 2})


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget what this process knows about its caches, as a new process would."""
    return cache._open_store.cache_clear


def compiler_script(path: Path, body: str) -> str:
    """A compiler that tells g++'s identity and otherwise runs `body`."""
    path.write_text(f'#!/bin/sh\ncase "$1" in --version|-dumpmachine) exec {GXX} "$1";; esac\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


# -- the plain way


def test_units_are_built_once_and_found_again(
    config: Config, fresh: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    units = [unit("a", 1), unit("b", 2), unit("c", 3)]
    library = build(units, config)
    assert [call(library, name) for name in "abc"] == [1, 2, 3]
    assert (library.stats.hits, library.stats.compiled) == (0, 3) and library.stats.seconds > 0
    fresh()

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a process was started: {args}")

    monkeypatch.setattr(subprocess, "Popen", forbidden)
    again = build([*units[:2], *units[2:]], config)
    assert (again.stats.hits, again.stats.compiled) == (3, 0)
    assert [call(again, name) for name in "abc"] == [1, 2, 3]
    assert again.keys == library.keys


def test_equal_sources_are_built_once(config: Config) -> None:
    same = unit("a", 5)
    library = build([same, Unit("twin", same.source), unit("b", 6), same], config)
    assert library.stats.compiled == 2 and len(set(library.keys)) == 2 and len(library.units) == 4
    assert call(library, "a") == 5


def test_unknown_symbol_is_named(config: Config) -> None:
    library = build([unit("a", 1)], config)
    for symbol in ("nope", "exp", "long"):
        with pytest.raises(BuildError, match=f"no unit exports '{symbol}'"):
            library.address(symbol)


def test_nothing_to_build(config: Config) -> None:
    assert build([], config).stats.compiled == 0


@pytest.mark.parametrize("isa", ["auto", "avx512", "avx2", "portable"])
def test_vectors_of_each_isa(isa: str, config: Config, tmp_path: Path) -> None:
    settings = Config.make(None, {"cache_dir": str(tmp_path / "c"), "isa": isa})
    try:
        lanes = toolchain.lanes(settings)
    except OptionError:
        pytest.skip(f"this CPU has no {isa}")
    source = f"""
        typedef float vec __attribute__((vector_size(4 * DICP_LANES)));
        {EXPORT}long wide(const long*) {{
          vec v = {{}};
          for (int i = 0; i < 3; ++i) v = v * v + (float)i;
          float s = 0;
          for (int i = 0; i < DICP_LANES; ++i) s += v[i];
          return (long)s;
        }}"""
    assert call(build([Unit("wide", source)], settings), "wide") == 3 * lanes


def test_isa_the_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "cpu_flags", lambda: frozenset({"avx2", "fma", "f16c"}))
    with pytest.raises(OptionError, match="offers only portable, avx2"):
        toolchain.host_isa(Config(isa="avx512"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert toolchain.host_isa(Config()) == "portable"


def test_flags_never_break_inf_and_nan(config: Config) -> None:
    fast = toolchain.flags(Config()).code
    assert not {"-ffast-math", "-Ofast", "-ffinite-math-only", "-march=native"} & set(fast)
    assert "-ffp-contract=off" in toolchain.flags(Config(numerics="eager")).code
    source = f"{EXPORT}long isnan_(const long* a) {{ double d = *(const double*)a[0]; return d != d; }}"
    library = build([Unit("isnan_", source)], config)
    cell = ctypes.c_double(float("nan"))
    fn = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))(library.address("isnan_"))
    assert fn((ctypes.c_int64 * 1)(ctypes.addressof(cell))) == 1


def test_units_are_optimised_as_much_as_they_ask_for() -> None:
    light = ["-O1", "-fpeel-loops", "-fexpensive-optimizations"]  # without the last, no multiply-adds are made

    def level(identity: str, effort: toolchain.Effort) -> list[str]:
        code = toolchain.flags(Config(), identity, effort).code
        return [flag for flag in code if flag.startswith("-O") or flag in light[1:]]

    gcc = [level("g++ 12.2.0 | x86_64", effort) for effort in toolchain.EFFORTS]
    assert gcc == [["-O3"], ["-O3"], light, ["-O0"]]
    clang = [level("clang version 16.0.6 | x86_64", effort) for effort in toolchain.EFFORTS]
    assert clang == [["-O3"], ["-O3"], ["-O3"], ["-O0"]]
    contracts = [
        "-ffp-contract=fast" in toolchain.flags(Config(), effort=effort).code for effort in toolchain.EFFORTS
    ]
    assert contracts == [True, False, True, True]


@pytest.mark.skipif(toolchain.host_isa(Config()) == "portable", reason="torch exports no 4-lane SLEEF")
def test_torch_symbols_and_one_openmp_pool(tmp_path: Path) -> None:
    """In a fresh process, so that nothing but torch and the unit has been loaded."""
    script = f"""
import ctypes, torch
from dicp.config import Config
from dicp.vendor.cpu_graph.build import Unit, build
source = '''
typedef float v8 __attribute__((vector_size(32)));
extern "C" int aoti_torch_device_type_cpu();
extern "C" v8 Sleef_expf8_u10(v8);
extern "C" int omp_get_max_threads();
extern "C" double exp(double);
extern "C" __attribute__((visibility("default"))) long f(const long* a) {{
  long sum = 0;
#pragma omp parallel for reduction(+ : sum)
  for (int i = 0; i < 1000; ++i) sum += i;
  v8 one = {{(float)a[0]}};
  return sum * 1000000 + (long)(Sleef_expf8_u10(one)[0] * 1000) * 100 + (long)exp((double)a[0]) * 10
       + aoti_torch_device_type_cpu() + 5 * (omp_get_max_threads() == 3);
}}'''
torch.set_num_threads(3)
fn = build([Unit("f", source)], Config.make(None, {{"cache_dir": {str(tmp_path / "c")!r}}})).address("f")
result = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))(fn)((ctypes.c_int64 * 1)(1))
assert result == 499500 * 1000000 + 2718 * 100 + 20 + 5, result
mapped = {{line.split()[-1] for line in open("/proc/self/maps") if "/" in line}}
gomp = [m for m in mapped if "libgomp" in m or "libomp" in m or "libiomp" in m]
assert len(gomp) == 1, gomp
assert len([m for m in mapped if "libtorch_cpu" in m]) == 1
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=120)


# -- keys


def test_what_goes_into_the_key(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    base = build([unit("a", 1)], config).keys[0]

    def key(**changes: Any) -> str:
        options = {"cache_dir": config.cache_dir, **changes}
        return build([unit("a", 1)], Config.make(None, options)).keys[0]

    assert key() == base == key(debug=3) == key(workers=1)
    assert key(isa="portable") != base
    assert key(numerics="eager") != base
    for rank in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(rank, "3")
    assert key() == base
    parts = toolchain.environment_parts()
    for name in ("torch", "dicp", "headers"):
        monkeypatch.setattr(toolchain, "environment_parts", lambda name=name: {**parts, name: "other"})
        assert key() != base, name


def test_another_compiler_misses(config: Config, tmp_path: Path) -> None:
    base = build([unit("a", 1)], config).keys[0]
    other = tmp_path / "other-g++"
    other.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "g++ 99.1" && exit\nexec {GXX} "$@"\n')
    other.chmod(0o755)
    library = build([unit("a", 1)], Config.make(None, {"cache_dir": config.cache_dir, "cxx": str(other)}))
    assert library.keys[0] != base and library.stats.compiled == 1


def test_another_argument_of_the_compiler_misses(config: Config) -> None:
    """As `DICP_CXX="g++ -fsanitize=address"` gives it, in this process and where the identity is remembered."""
    keys = set()
    for cxx in (GXX, f"{GXX} -DWITH_ITS_OWN", f"{GXX} -DWITH_ANOTHER", f"{GXX} -DWITH_ITS_OWN"):
        keys.add(build([unit("a", 1)], Config.make(None, {"cache_dir": config.cache_dir, "cxx": cxx})).keys[0])
    assert len(keys) == 3


def test_compiler_identity_is_asked_once(config: Config, tmp_path: Path) -> None:
    log = tmp_path / "asked"
    script = tmp_path / "g++-log"
    script.write_text(f'#!/bin/sh\necho "$1" >> {log}\nexec {GXX} "$@"\n')
    script.chmod(0o755)
    settings = Config.make(None, {"cache_dir": config.cache_dir, "cxx": str(script)})
    for _ in range(3):
        build([unit("a", 1)], settings)
    assert log.read_text().split().count("--version") == 1
    assert len(log.read_text().split()) == 3  # --version, -dumpmachine, one compile


# -- no compiler


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")


def test_missing_compiler_says_what_to_install(config: Config, no_compiler: None) -> None:
    with pytest.raises(ToolchainError) as raised:
        build([unit("a", 1)], config)
    for words in (
        "g++, c++, clang++",
        "apt-get install g++",
        "dnf install gcc-c++",
        "conda install",
        "DICP_CXX",
    ):
        assert words in str(raised.value)


def test_named_compiler_that_is_missing_or_broken(tmp_path: Path) -> None:
    for name, words in (("no-such-cxx", "looked for no-such-cxx"), ("false", "does not work")):
        with pytest.raises(ToolchainError, match=words):
            build([unit("a", 1)], Config.make(None, {"cache_dir": str(tmp_path), "cxx": name}))


def test_cached_units_need_no_compiler(
    config: Config, fresh: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    build([unit("a", 1), unit("b", 2)], config)
    fresh()
    monkeypatch.setenv("PATH", "/nowhere")
    library = build([unit("a", 1), unit("b", 2)], config)
    assert call(library, "b") == 2 and library.stats.compiled == 0
    with pytest.raises(ToolchainError):
        build([unit("a", 1), unit("new", 3)], config)


def test_no_compile_raises_rather_than_builds(config: Config) -> None:
    serving = Config.make(None, {"cache_dir": config.cache_dir, "no_compile": True})
    build([unit("a", 1)], config)
    assert call(build([unit("a", 1)], serving), "a") == 1
    with pytest.raises(NoCompileError, match="new") as raised:
        build([unit("a", 1), unit("new", 3)], serving)
    assert "model.py:3" in str(raised.value)


def test_compiler_vanishing_between_asking_and_using(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = toolchain.Toolchain((str(tmp_path / "gone"),), "g++ 12 | x86_64")
    monkeypatch.setattr(toolchain, "find", lambda *_: (gone, ""))
    with pytest.raises(ToolchainError, match="has vanished"):
        build([unit("a", 1)], Config.make())


# -- a compiler that fails or hangs


def test_failure_shows_message_file_and_user_line(config: Config) -> None:
    bad = unit("bad", 7, extra="int nonsense = undeclared_name;\n" * 60)
    with pytest.raises(BuildError) as raised:
        build([unit("good", 1), bad], config)
    error = raised.value
    assert "undeclared_name" in error.message and "more lines" in error.message
    assert len(error.message.splitlines()) <= 31
    assert Path(error.source).read_text() == bad.source
    assert "model.py:7  y = bad(x)" in str(error) and "bad" in error.what
    shown = re.search(r"the command alone: (.*)", str(error))
    assert shown is not None
    alone = subprocess.run(shown[1], shell=True, capture_output=True, text=True)
    assert "undeclared_name" in alone.stderr, "the command in the message reproduces the failure"
    assert call(build([unit("good", 1)], config), "good") == 1


def test_undefined_symbol_shows_when_loaded(config: Config) -> None:
    source = f'extern "C" long not_there();\n{EXPORT}long f(const long*) {{ return not_there(); }}'
    with pytest.raises(BuildError, match="undefined symbol: not_there") as raised:
        build([Unit("f", source, ("model.py:3  f",))], config)
    assert "model.py:3" in str(raised.value)


def test_a_compiler_that_crashes_is_asked_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cxx = compiler_script(
        tmp_path / "crashes",
        'case "$*" in *-fno-tree-slp-vectorize*) ;; *unit.cpp*)\n'
        '  echo "unit.cpp:9:56: internal compiler error: Segmentation fault"; exit 1;; esac\n'
        f'exec {GXX} "$@"',
    )
    with caplog.at_level("WARNING", "dicp.build"):
        library = build([unit("a", 1)], Config.make(None, {"cache_dir": str(tmp_path / "c"), "cxx": cxx}))
    assert call(library, "a") == 1
    assert "crashed on a" in caplog.text


def test_a_compiler_that_crashes_twice_is_an_error(tmp_path: Path) -> None:
    crash = "echo internal compiler error; exit 1"
    cxx = compiler_script(tmp_path / "crashes", f'case "$*" in *unit.cpp*) {crash};; esac\nexec {GXX} "$@"')
    with pytest.raises(BuildError, match="internal compiler error"):
        build([unit("a", 1)], Config.make(None, {"cache_dir": str(tmp_path / "c"), "cxx": cxx}))


NAP = f"4321.{os.getpid()}"  # a duration only this run's compilers sleep


def sleepers() -> list[str]:
    """Compilers still asleep; the kernel may take a moment to bury a killed one on a busy machine."""
    end = time.monotonic() + 5
    while True:
        found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        alive = [line for line in found.splitlines() if line.startswith(f"sleep {NAP}")]
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(0.05)


def test_hanging_compiler_is_killed_with_its_children(tmp_path: Path) -> None:
    cxx = compiler_script(tmp_path / "hang", f"sleep {NAP}; true")
    settings = Config.make(None, {"cache_dir": str(tmp_path / "c"), "cxx": cxx, "compile_timeout_s": 1})
    start = time.monotonic()
    with pytest.raises(BuildError, match="did not finish a within 1 s"):
        build([unit("a", 1)], settings)
    assert time.monotonic() - start < 10
    assert sleepers() == []


def test_first_failure_stops_the_others(tmp_path: Path) -> None:
    cxx = compiler_script(tmp_path / "some", 'grep -q "^// bad" unit.cpp && exit 3\n' + f"sleep {NAP}; true")
    settings = Config.make(None, {"cache_dir": str(tmp_path / "c"), "cxx": cxx, "workers": 3})
    start = time.monotonic()
    with pytest.raises(BuildError, match="failed on bad"):
        build([unit("a", 1), unit("b", 2), unit("bad", 3), unit("c", 4), unit("d", 5)], settings)
    assert time.monotonic() - start < 10
    assert sleepers() == []


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt; a shell that starts tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_keyboard_interrupt_leaves_no_process(tmp_path: Path, interruptible: None) -> None:
    started = tmp_path / "started"
    cxx = compiler_script(tmp_path / "hang", f"touch {started}; sleep {NAP}; true")
    for workers in (1, 2):
        started.unlink(missing_ok=True)
        settings = Config.make(None, {"cache_dir": str(tmp_path / "c"), "cxx": cxx, "workers": workers})

        def interrupt() -> None:
            while not started.exists():
                time.sleep(0.01)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        # A shell that started this process in the background had it ignore the signal.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                build([unit("a", 1), unit("b", 2)], settings)
        finally:
            signal.signal(signal.SIGINT, before)
        assert sleepers() == []


def test_compiler_killed_by_a_signal(tmp_path: Path) -> None:
    cxx = compiler_script(tmp_path / "oom", "kill -9 $$")
    settings = Config.make(None, {"cache_dir": str(tmp_path / "c"), "cxx": cxx})
    with pytest.raises(BuildError, match="killed by signal 9.*\n(.*\n)*.*workers=1"):
        build([unit("a", 1)], settings)


@pytest.mark.parametrize("words", ["/usr/bin/ld: cannot find -lomp:", "ld.lld: error: unable to find library -lomp"])
def test_clang_without_openmp_says_what_to_install(words: str, tmp_path: Path) -> None:
    cxx = compiler_script(tmp_path / "clang++", f"echo {words!r}; exit 1")
    with pytest.raises(ToolchainError, match="no OpenMP runtime.*\n.*libomp-dev"):
        build([unit("a", 1)], Config.make(None, {"cache_dir": str(tmp_path / "c"), "cxx": cxx}))


def test_compiler_that_claims_success_without_a_result(tmp_path: Path) -> None:
    cxx = compiler_script(tmp_path / "liar", "exit 0")
    with pytest.raises(BuildError, match="failed on a"):
        build([unit("a", 1)], Config.make(None, {"cache_dir": str(tmp_path / "c"), "cxx": cxx}))


def test_disk_full_for_the_compiler(tmp_path: Path) -> None:
    cxx = compiler_script(
        tmp_path / "full",
        f'case "$PWD" in {tmp_path}/c/*) echo "as: close failed: No space left on device"; exit 1;; esac\n'
        f'exec {GXX} "$@"',
    )
    library = build([unit("a", 1)], Config.make(None, {"cache_dir": str(tmp_path / "c"), "cxx": cxx}))
    assert call(library, "a") == 1


def test_full_disk_for_real(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k,mode=0700", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    try:
        assert call(build([unit("a", 1)], Config.make(None, {"cache_dir": str(disk)})), "a") == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# -- damage and races


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "gone"])
def test_damaged_library_is_rebuilt_not_loaded(damage: str, config: Config) -> None:
    key = build([unit("a", 1), unit("b", 2)], config).keys[0]
    path = Path(config.cache_dir or "") / "v1" / "entries" / key / "unit.so"
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage == "flipped":
        data[len(data) // 2] ^= 4
    if damage != "gone":
        path.write_bytes({"truncated": data[:4000], "empty": b"", "flipped": data}[damage])
    library = build([unit("a", 1), unit("b", 2)], config)
    assert (library.stats.hits, library.stats.compiled) == (1, 1) and call(library, "a") == 1


def test_eviction_between_finding_and_loading(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    # by a child: what this process has loaded once, the loader would not look for again
    child = multiprocessing.get_context("fork").Process(target=build, args=([unit("a", 41)], config))
    child.start()
    child.join()
    load, removed = ctypes.CDLL, []

    def evict_first(path: str, **kwargs: Any) -> ctypes.CDLL:
        if not removed:
            removed.append(path)
            shutil.rmtree(Path(path).parent)
        return load(path, **kwargs)

    monkeypatch.setattr(ctypes, "CDLL", evict_first)
    assert call(build([unit("a", 41)], config), "a") == 41 and removed


def _racer(root: Path, cxx: str, start: float) -> None:
    time.sleep(max(0.0, start - time.time()))
    settings = Config.make(None, {"cache_dir": str(root), "cxx": cxx, "workers": 2})
    library = build([unit(f"k{i}", i) for i in range(6)], settings)
    assert [call(library, f"k{i}") for i in range(6)] == list(range(6))


def test_racing_processes_compile_each_unit_once(tmp_path: Path) -> None:
    log = tmp_path / "compiled"
    cxx = compiler_script(tmp_path / "g++-log", f'head -1 unit.cpp >> {log}\nexec {GXX} "$@"')
    fork = multiprocessing.get_context("fork")
    start = time.time() + 0.2
    racers = [fork.Process(target=_racer, args=(tmp_path / "c", cxx, start)) for _ in range(8)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0
    assert sorted(log.read_text().split()) == sorted([w for i in range(6) for w in ("//", f"k{i}")])


def test_building_from_several_threads(config: Config) -> None:
    wrong: list[object] = []

    def work(seed: int) -> None:
        library = build([unit(f"k{i}", i) for i in range(4)] + [unit(f"own{seed}", seed)], config)
        got = [call(library, f"k{i}") for i in range(4)] + [call(library, f"own{seed}")]
        if got != [0, 1, 2, 3, seed]:
            wrong.append(got)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def _build_units(root: Path) -> None:
    build([unit(f"k{i}", i) for i in range(3)], Config.make(None, {"cache_dir": str(root)}))


@pytest.mark.slow
def test_kill_during_compiles(tmp_path: Path) -> None:
    fork, root = multiprocessing.get_context("fork"), tmp_path / "c"
    for i in range(60):
        victim = fork.Process(target=_build_units, args=(root,))
        victim.start()
        time.sleep(0.02 * (i % 20))
        victim.kill()
        victim.join()
        if i % 15 == 14:
            library = build([unit(f"k{j}", j) for j in range(3)], Config.make(None, {"cache_dir": str(root)}))
            assert [call(library, f"k{j}") for j in range(3)] == [0, 1, 2]
            shutil.rmtree(root)


# -- builds that begin with some of their units


def logging_compiler(tmp_path: Path, before: str = "") -> Config:
    """Notes each compile in tmp_path/log."""
    cxx = compiler_script(
        tmp_path / "noting", f'head -n 1 unit.cpp >>{tmp_path}/log\n{before}\nexec {GXX} "$@"'
    )
    return Config.make(None, {"cache_dir": str(tmp_path / "c"), "cxx": cxx, "workers": 2})


def compiles(tmp_path: Path) -> list[str]:
    return sorted(line.removeprefix("// ") for line in (tmp_path / "log").read_text().splitlines())


def test_what_has_begun_is_compiled_once(tmp_path: Path) -> None:
    settings = logging_compiler(tmp_path)
    units = [unit(name, k) for k, name in enumerate("abcde")]
    with Build(settings) as running:
        running.begin(units[:3])
        running.begin(units[1:4])
        library = running.finish(units)
    assert [call(library, name) for name in "abcde"] == [0, 1, 2, 3, 4]
    assert (library.stats.hits, library.stats.compiled) == (0, 5)
    assert compiles(tmp_path) == list("abcde")
    with Build(settings) as running:
        running.begin(units[:3])
        assert running.finish(units).stats.hits == 5
    assert compiles(tmp_path) == list("abcde")


def test_what_failed_after_it_had_begun_is_told_at_the_end(tmp_path: Path) -> None:
    with Build(logging_compiler(tmp_path)) as running:
        running.begin([unit("bad", 7, "int x = ;"), unit("a", 1), unit("b", 2)])
        with pytest.raises(BuildError, match=r"failed on bad(.*\n)*.*model.py:7"):
            running.finish([unit("bad", 7, "int x = ;"), unit("a", 1), unit("b", 2)])


def test_a_unit_after_one_that_failed_is_compiled(tmp_path: Path) -> None:
    settings = Config.make(None, {"cache_dir": str(tmp_path / "c"), "workers": 1})
    with Build(settings) as running:
        running.begin([unit("bad", 7, "int x = ;"), unit("a", 1)])
        library = running.finish([unit("a", 1)])
    assert call(library, "a") == 1


def test_a_compiler_that_crashes_on_what_has_begun_is_asked_again(tmp_path: Path) -> None:
    settings = logging_compiler(
        tmp_path, 'case "$*" in *no-tree-slp*) ;; *unit.cpp*) echo "internal compiler error"; exit 1;; esac'
    )
    with Build(settings) as running:
        running.begin([unit("a", 1)])
        assert call(running.finish([unit("a", 1)]), "a") == 1


def test_leaving_a_begun_build_kills_its_compilers(tmp_path: Path) -> None:
    settings = logging_compiler(tmp_path, f"sleep {NAP}")
    with pytest.raises(ZeroDivisionError), Build(settings) as running:
        running.begin([unit("a", 1), unit("b", 2), unit("c", 3)])
        while not (tmp_path / "log").exists():
            time.sleep(0.01)
        raise ZeroDivisionError
    assert sleepers() == []
    free = Config.make(None, {"cache_dir": str(tmp_path / "c")})
    assert call(build([unit("a", 1)], free), "a") == 1  # nothing is reserved any more
    assert list((tmp_path / "c" / "v1" / "tmp").iterdir()) == []


def test_a_compiler_that_hangs_on_what_has_begun_is_killed(tmp_path: Path) -> None:
    cxx = compiler_script(tmp_path / "hang", f"sleep {NAP}; true")
    settings = Config.make(None, {"cache_dir": str(tmp_path / "c"), "cxx": cxx, "compile_timeout_s": 1})
    with Build(settings) as running:
        running.begin([unit("a", 1)])
        with pytest.raises(BuildError, match="did not finish a within 1 s"):
            running.finish([unit("a", 1)])
    assert sleepers() == []


def test_an_uncollected_queue_is_released_with_the_build(tmp_path: Path) -> None:
    settings = Config.make(None, {"cache_dir": str(tmp_path / "c"), "workers": 1})
    with Build(settings) as running:
        running.begin([unit("a", 1)])
        running.pool.submit(time.sleep, 0.2)
        running.submit([])  # to be collected after the sleep, and cancelled before
    store = cache.open_store(settings)
    entry = store.reserve(running.plans[unit("a", 1).source].keys[0])
    assert entry is not None
    entry.release()


def test_what_another_process_builds_is_not_begun(tmp_path: Path) -> None:
    settings = logging_compiler(tmp_path, "sleep 1")
    with Build(settings) as first, Build(settings) as second:
        first.begin([unit("a", 1)])
        second.begin([unit("a", 1)])
        assert not second.queues
        assert call(first.finish([unit("a", 1)]), "a") == call(second.finish([unit("a", 1)]), "a") == 1
    assert compiles(tmp_path) == ["a"]


def test_nothing_begins_where_nothing_may_be_compiled(config: Config) -> None:
    with Build(dataclasses.replace(config, no_compile=True)) as running:
        running.begin([unit("a", 1)])
        with pytest.raises(NoCompileError, match="1 kernels are not in the cache"):
            running.finish([unit("a", 1)])

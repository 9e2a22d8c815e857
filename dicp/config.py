"""The one typed configuration; `python -m dicp.config [--json]` lists every option.

An option's value is, in order: what `options=` or `mode=` says, its environment variable, its default.
No other file reads dicp's environment variables.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from dicp.errors import OptionError

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
_TYPES: dict[str, tuple[type, bool]] = {  # annotation -> (type, may be None)
    "bool": (bool, False),
    "int": (int, False),
    "str": (str, False),
    "int | None": (int, True),
    "str | None": (str, True),
}


def _option(
    default: Any,
    doc: str,
    *,
    codegen: bool = False,
    choices: tuple[str, ...] = (),
    bounds: tuple[int, int] | None = None,
    env: tuple[str, ...] = (),
) -> Any:
    meta = {"doc": doc, "codegen": codegen, "choices": choices, "bounds": bounds, "env": env}
    return dataclasses.field(default=default, metadata=meta)


@dataclasses.dataclass(frozen=True)
class Config:
    """What a compile may be told. Frozen: two equal configs compile the same thing."""

    strict: bool = _option(False, "An op nobody covers is an error instead of an extern call.", codegen=True)
    verify: bool = _option(
        False,
        "Check shape, dtype and stride of each node after each pass, and results and inputs of each call.",
        codegen=True,
    )
    debug: int = _option(
        0,
        "Verbosity: 1 a line per graph, 2 time per kernel, 3 graph after each pass, 4 source, 5 kernel IR.",
        bounds=(0, 5),
    )
    dump: str | None = _option(None, "Folder that receives every stage's graph, source and memory plan.")
    numerics: str = _option(
        "fast",
        "'eager' rounds wherever eager rounds, so that bit patterns can be compared (docs/numerics.md).",
        codegen=True,
        choices=("fast", "eager"),
    )
    freeze: bool = _option(
        False,
        "Inference: what depends on weights alone is computed once, and when they change (docs/freezing.md).",
        codegen=True,
    )
    no_compile: bool = _option(False, "Raise NoCompileError rather than build anything (for serving).")
    workers: int | None = _option(
        None, "Parallel compiler processes; unset: from affinity, cgroup and free memory.", bounds=(1, 4096)
    )
    cache_dir: str | None = _option(None, "Build cache folder; unset: $XDG_CACHE_HOME/dicp or ~/.cache/dicp.")
    cache_size_mb: int = _option(
        2048, "Cache size above which least recently used entries go, in MiB.", bounds=(1, 1 << 30)
    )
    isa: str = _option(
        "auto",
        "Vector instructions of CPU kernels; auto: what torch uses on this machine.",
        codegen=True,
        choices=("auto", "avx512", "avx2", "portable"),
    )
    layout: bool = _option(
        True, "Channels-last propagation where its cost estimate says it pays.", codegen=True
    )
    keep_results: bool = _option(
        True,
        "Large results, saved activations and temporaries lie in a pool that keeps its pages (CPU); such a "
        "tensor's storage cannot be resized.",
        codegen=True,
    )
    cuda_graphs: bool = _option(False, "Replay the compiled program as a CUDA graph.", codegen=True)
    max_autotune: bool = _option(False, "Time more candidates per kernel and library call.", codegen=True)
    interpret: bool = _option(
        False,
        "Run Triton kernels in the interpreter, on CPU tensors.",
        codegen=True,
        env=("DICP_CUDA_INTERPRET",),
    )
    cxx: str | None = _option(
        None, "C++ compiler; unset: $CXX, then g++, c++, clang++ on PATH.", env=("DICP_CXX", "CXX")
    )
    compile_timeout_s: int = _option(
        300, "Seconds after which one compiler process counts as hung.", bounds=(1, 86400)
    )

    @staticmethod
    def make(mode: str | None = None, options: Mapping[str, Any] | None = None) -> Config:
        """Config from what `torch.compile(mode=, options=)` was given; OptionError names near matches."""
        _warn_of_misspelled_variables()
        values = {name: value for name in FIELDS if (value := _from_env(name)) is not None}
        if mode is not None:
            if mode not in MODES:
                raise OptionError(f"unknown mode {mode!r}", todo=_suggest(str(mode), MODES))
            values.update(MODES[mode])
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(f"options is {options!r}", todo="give a dict, as {'strict': True}")
        for key, value in (options or {}).items():
            name = str(key).replace("-", "_")
            if name not in FIELDS:
                raise OptionError(f"unknown option {key!r}", todo=_suggest(name, FIELDS))
            values[name] = _checked(name, value, f"option {name!r}")
        return Config(**values)

    def fingerprint(self) -> str:
        """Stable text of the options that change what a compile produces."""
        return ",".join(
            f"{name}={getattr(self, name)}" for name, f in FIELDS.items() if f.metadata["codegen"]
        )


MODES: dict[str, dict[str, bool]] = {
    "default": {},
    "reduce-overhead": {"cuda_graphs": True},
    "max-autotune": {"max_autotune": True, "cuda_graphs": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True},
}
FIELDS: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(Config)}


def env_names(name: str) -> tuple[str, ...]:
    """Environment variables that mirror an option, first one wins."""
    names: tuple[str, ...] = FIELDS[name].metadata["env"]
    return names or (f"DICP_{name.upper()}",)


def _from_env(name: str) -> Any:
    for var in env_names(name):
        text = os.environ.get(var)
        if text is None or (text == "" and FIELDS[name].type != "bool"):
            continue
        return _checked(name, _parse(name, text, var), f"environment variable {var}")
    return None


@functools.cache
def _warn_of_misspelled_variables() -> None:
    """Once a process: a variable that is none of dicp's, but nearly, would do nothing and say nothing."""
    known = [var for name in FIELDS for var in env_names(name)]
    for var in os.environ:
        if var.startswith("DICP_") and var not in known:
            near = difflib.get_close_matches(var, known, n=1, cutoff=0.85)
            if near:
                warnings.warn(f"environment variable {var}: did you mean {near[0]}?", stacklevel=3)


def _parse(name: str, text: str, var: str) -> Any:
    kind, _ = _TYPES[str(FIELDS[name].type)]
    if kind is bool:
        if text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        raise OptionError(f"environment variable {var}={text!r} is not a bool", todo="use 1 or 0")
    if kind is int:
        try:
            return int(text)
        except ValueError:
            raise OptionError(
                f"environment variable {var}={text!r} is not an int", todo="use digits"
            ) from None
    return text


def _checked(name: str, value: Any, source: str) -> Any:
    """The value itself when its type, choice and bounds fit; OptionError otherwise."""
    field = FIELDS[name]
    kind, optional = _TYPES[str(field.type)]
    if value is None and optional:
        return None
    if name in ("dump", "cache_dir") and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        got = f"{value!r} ({type(value).__name__})"
        raise OptionError(f"{source} wants {field.type}, got {got}", todo=f"{name}: {field.metadata['doc']}")
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise OptionError(f"{source} is {value!r}", todo=_suggest(str(value), choices))
    bounds = field.metadata["bounds"]
    if bounds and not bounds[0] <= value <= bounds[1]:
        raise OptionError(f"{source} is {value}", todo=f"use a value from {bounds[0]} to {bounds[1]}")
    return value


def _suggest(word: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(word.lower(), names, n=3, cutoff=0.5)
    head = f"did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    return f"{head}known: {', '.join(names)}"


def describe() -> list[dict[str, Any]]:
    """One row per option: name, type, default, choices, env, doc, and the value in this environment."""
    now = Config.make()
    return [
        {
            "name": name,
            "type": str(field.type),
            "default": field.default,
            "choices": list(field.metadata["choices"]),
            "env": list(env_names(name)),
            "doc": field.metadata["doc"],
            "value": getattr(now, name),
        }
        for name, field in FIELDS.items()
    ]


def main(argv: list[str]) -> int:
    """Print the options as a table, or as JSON."""
    if set(argv) - {"--json"}:
        print("usage: python -m dicp.config [--json]", file=sys.stderr)
        return 2
    rows = describe()
    if "--json" in argv:
        print(json.dumps({"options": rows, "modes": MODES}, indent=2))
        return 0
    for row in rows:
        values = "|".join(row["choices"]) or row["type"]
        changed = "" if row["value"] == row["default"] else f"   [now {row['value']!r}]"
        print(f"{row['name']:<18} {values} = {row['default']!r}   {', '.join(row['env'])}{changed}")
        print(f"{'':<18}   {row['doc']}")
    for mode, sets in MODES.items():
        print(f"mode {mode!r}: {', '.join(sets) or 'no option set'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

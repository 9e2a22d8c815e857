from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dicp import config
from dicp.config import FIELDS, MODES, Config, env_names
from dicp.errors import DicpError, OptionError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("options", "near"),
    [
        ({"strickt": True}, "'strict'"),
        ({"max_autotun": True}, "'max_autotune'"),
        ({"cudagraphs": True}, "'cuda_graphs'"),
        ({"isa": "avx51"}, "'avx512'"),
        ({"numerics": "Eagre"}, "'eager'"),
    ],
)
def test_unknown_names_are_refused_with_the_near_match(options: dict[str, Any], near: str) -> None:
    with pytest.raises(OptionError) as raised:
        Config.make(None, options)
    assert f"did you mean {near}" in str(raised.value)
    assert isinstance(raised.value, ValueError) and isinstance(raised.value, DicpError)


def test_unknown_mode_is_refused_with_the_near_match() -> None:
    with pytest.raises(OptionError, match="did you mean 'max-autotune'"):
        Config.make("max-autotun")
    with pytest.raises(OptionError, match="known: default, reduce-overhead"):
        Config.make("zzz")


@pytest.mark.parametrize(
    "options",
    [
        {"strict": 1},
        {"strict": "yes"},
        {"debug": True},
        {"debug": "3"},
        {"dump": 5},
        {"isa": None},
        {"workers": 1.0},
    ],
)
def test_wrong_types_are_refused_by_name(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(OptionError, match=f"option '{name}' wants"):
        Config.make(None, options)


@pytest.mark.parametrize("options", [{"debug": 6}, {"debug": -1}, {"workers": 0}, {"cache_size_mb": 0}])
def test_values_out_of_bounds_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="use a value from"):
        Config.make(None, options)


def test_modes_set_what_they_say_and_options_win() -> None:
    assert (
        Config.make()
        == Config.make("default")
        == dataclasses.replace(Config(), cache_dir=Config.make().cache_dir)
    )
    assert Config.make("reduce-overhead").cuda_graphs and not Config.make("reduce-overhead").max_autotune
    both = Config.make("max-autotune")
    assert both.cuda_graphs and both.max_autotune
    assert not Config.make("max-autotune-no-cudagraphs").cuda_graphs
    assert not Config.make("max-autotune", {"cuda_graphs": False}).cuda_graphs
    assert Config.make(None, {"max-autotune": True}).max_autotune
    assert set(MODES) == {"default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"}


def test_environment_mirrors_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, field in FIELDS.items():
        var = env_names(name)[0]
        assert var.startswith("DICP_")
        choices = field.metadata["choices"]
        default = field.default
        text, value = {
            "bool": ("0" if default else "1", not default),
            "int": ("3", 3),
            "int | None": ("3", 3),
        }.get(str(field.type), (choices[-1], choices[-1]) if choices else ("text", "text"))
        monkeypatch.setenv(var, text)
        assert getattr(Config.make(), name) == value, name
        monkeypatch.delenv(var)
    monkeypatch.setenv("DICP_DEBUG", "2")
    assert Config.make(None, {"debug": 4}).debug == 4


@pytest.mark.parametrize(
    ("var", "text"),
    [("DICP_DEBUG", "lots"), ("DICP_DEBUG", "9"), ("DICP_STRICT", "maybe"), ("DICP_ISA", "sse")],
)
def test_bad_environment_is_named(var: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(var, text)
    with pytest.raises(OptionError, match=var):
        Config.make()


def test_fingerprint_moves_with_what_changes_code_only() -> None:
    base = Config().fingerprint()
    assert base == Config().fingerprint()
    for name in ("strict", "freeze", "cuda_graphs", "max_autotune", "interpret", "verify"):
        assert dataclasses.replace(Config(), **{name: True}).fingerprint() != base, name
    assert dataclasses.replace(Config(), numerics="eager").fingerprint() != base
    assert dataclasses.replace(Config(), isa="avx2").fingerprint() != base
    same = dataclasses.replace(
        Config(), debug=5, workers=3, cache_dir="/x", no_compile=True, dump="/y", cxx="g++"
    )
    assert same.fingerprint() == base


def test_config_is_frozen_hashable_and_every_option_is_documented() -> None:
    assert hash(Config()) == hash(Config())
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().strict = True  # type: ignore[misc]
    assert all(len(field.metadata["doc"]) > 10 for field in FIELDS.values())


def test_listing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dicp.config", "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    rows = {row["name"]: row for row in json.loads(done.stdout)["options"]}
    assert set(rows) == set(FIELDS)
    assert rows["interpret"]["env"] == ["DICP_CUDA_INTERPRET"]
    plain = subprocess.run(
        [sys.executable, "-m", "dicp.config"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "DICP_ISA" in plain.stdout and "mode 'max-autotune'" in plain.stdout


def test_misspelled_variable_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DICP_STRIC", "1")
    monkeypatch.setenv("DICP_MY_CHIPS_CLOCK", "7")  # a vendor's own
    config._warn_of_misspelled_variables.cache_clear()
    with pytest.warns(UserWarning) as told:
        Config.make()
        Config.make()
    assert [str(w.message) for w in told] == ["environment variable DICP_STRIC: did you mean DICP_STRICT?"]

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dicp import cache as cli
from dicp.config import Config
from dicp.runtime.cache import Store, open_store
from dicp.runtime.entry import Key

BASE = {"source": "1", "flags": "-O3", "compiler": "g++ 12", "isa": "avx512", "torch": "2.13"}


@pytest.fixture
def store() -> Store:
    return open_store(Config.make())


def add(store: Store, text: str = "int x;", **parts: str) -> str:
    def fill(folder: Path) -> None:
        (folder / "unit.cpp").write_text(text)

    return store.get_or_build(Key.of(**{**BASE, **parts}), fill, label="k0: add").name


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    status = cli.main([*words, "--json"])
    out = capsys.readouterr().out
    return status, json.loads(out) if out else None


def test_stats(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "stats")[1]["entries"] == 0
    add(store)
    add(store, compiler="", isa="")  # a Triton kernel's
    status, result = run(capsys, "stats")
    assert (
        status == 0 and result["entries"] == 2 and result["bytes"] > 6 and result["compilers"] == ["g++ 12"]
    )
    assert cli.main(["stats"]) == 0 and "entries: 2" in capsys.readouterr().out


def test_verify_finds_and_removes(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = add(store), add(store, source="2")
    (store.root / "v1" / "entries" / bad / "unit.cpp").write_text("int y;")
    status, result = run(capsys, "verify")
    assert status == 1 and list(result["removed"]) == [bad] and result["checked"] == 2
    assert run(capsys, "verify") == (0, {"checked": 1, "removed": {}})
    assert [e.name for e in store.entries()] == [good]


def test_clear(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    add(store), add(store, source="2")
    assert run(capsys, "clear") == (0, {"removed": 2})
    assert store.entries() == []


def test_export_and_import(
    store: Store, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = add(store)
    assert run(capsys, "export", str(tmp_path / "x.tgz"))[0] == 0
    monkeypatch.setenv("DICP_CACHE_DIR", str(tmp_path / "other"))
    assert run(capsys, "import", str(tmp_path / "x.tgz")) == (0, {"present": [name], "refused": []})
    assert (tmp_path / "other/v1/entries" / name / "unit.cpp").read_text() == "int x;"
    (tmp_path / "bad.tgz").write_bytes((tmp_path / "x.tgz").read_bytes()[:100])
    assert cli.main(["import", str(tmp_path / "bad.tgz")]) == 2
    assert "not a dicp cache archive" in capsys.readouterr().err
    assert cli.main(["import", str(tmp_path / "none.tgz")]) == 2


def test_why_names_what_differed(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    add(store, source="far", flags="-O0", isa="avx2")
    add(store)
    newer = add(store, torch="2.12")
    status, result = run(capsys, "why", newer[:12])
    assert status == 0 and result["differs"] == {"torch": {"this": "2.12", "nearest": "2.13"}}
    changed = add(store, text="int z;", source="3")
    differs = run(capsys, "why", changed)[1]["differs"]
    assert list(differs) == ["source"] and "+int z;" in differs["source"]["diff"]
    assert cli.main(["why", "ffffnothing"]) == 2


@pytest.mark.parametrize("words", [[], ["bogus"], ["export"], ["stats", "more"]])
def test_wrong_use(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert "usage" in capsys.readouterr().err


def test_unsafe_folder_is_reported(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    add(store)
    store.root.chmod(0o777)
    store._checked = False
    assert cli.main(["stats"]) == 2
    assert "can be written by others" in capsys.readouterr().err

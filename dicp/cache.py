"""The build cache from the command line:
`python -m dicp.cache stats|verify|clear|costs|export FILE|import FILE|why KEY`.

All take `--json`.  Exit status: 0 done, 1 damaged entries found, 2 wrong use or no access.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dicp.config import Config
from dicp.errors import DicpError
from dicp.runtime.cache import Store, open_store
from dicp.runtime.entry import inspect_entry, read_meta
from dicp.tuning.costs import table

USAGE = "usage: python -m dicp.cache stats|verify|clear|costs|export FILE|import FILE|why KEY [--json]"
_DIFF_LINES = 40


def stats(store: Store) -> dict[str, Any]:
    """Where the cache is, and how much is in it."""
    entries = store.entries()
    sizes = [sum(f.stat().st_size for f in e.iterdir()) for e in entries if e.is_dir()]
    metas = [meta for e in entries if (meta := read_meta(e)) is not None]
    created = [float(meta["created"]) for meta in metas]
    return {
        "root": str(store.root),
        "entries": len(entries),
        "bytes": sum(sizes),
        "limit_bytes": store.limit_bytes,
        "oldest_seconds": time.time() - min(created) if created else None,
        "compilers": sorted({c for meta in metas if (c := meta["parts"].get("compiler"))}),
        "isas": sorted({isa for meta in metas if (isa := meta["parts"].get("isa"))}),
    }


def verify(store: Store) -> dict[str, Any]:
    """Check every entry; damaged ones are removed and get rebuilt when they are needed."""
    checked = len(store.entries())
    return {"checked": checked, "removed": store.verify()}


def clear(store: Store) -> dict[str, Any]:
    """Remove every entry."""
    return {"removed": store.clear()}


def export(store: Store, file: str) -> dict[str, Any]:
    """Write all sound entries to one archive, for another machine with the same torch and CPU features."""
    archive = store.pack()
    path = Path(file)
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_bytes(archive)
    os.replace(fresh, path)
    return {"file": file, "bytes": len(archive)}


def import_(store: Store, file: str) -> dict[str, Any]:
    """Add an archive's entries.  They are code that will be run: import only what you trust."""
    added, refused = store.unpack(Path(file).read_bytes())
    return {"present": added, "refused": refused}


def why(store: Store, key: str) -> dict[str, Any]:
    """What tells an entry's key from its nearest relative's, i.e. why it was not found there."""
    entries = {e.name: e for e in store.entries() if inspect_entry(e) is None}
    matches = [name for name in entries if name.startswith(key)]
    if len(matches) != 1:
        raise DicpError(f"{len(matches)} entries start with {key!r}", todo="python -m dicp.cache stats")
    mine = read_meta(entries[matches[0]]) or {}
    others = {name: meta for name, e in entries.items() if name != matches[0] and (meta := read_meta(e))}
    if not others:
        return {"key": matches[0], "label": mine.get("label"), "nearest": None, "differs": {}}

    def likeness(name: str) -> tuple[int, bool, float]:
        parts = others[name]["parts"]
        same = sum(parts.get(k) == v for k, v in mine["parts"].items())
        return same, others[name]["label"] == mine["label"], others[name]["created"]

    nearest = max(others, key=likeness)
    theirs = others[nearest]["parts"]
    names = sorted(set(mine["parts"]) | set(theirs))
    differs: dict[str, Any] = {
        name: {"this": mine["parts"].get(name), "nearest": theirs.get(name)}
        for name in names
        if mine["parts"].get(name) != theirs.get(name)
    }
    if "source" in differs:
        differs["source"]["diff"] = _source_diff(entries[nearest], entries[matches[0]])
    return {"key": matches[0], "label": mine["label"], "nearest": nearest, "differs": differs}


def costs(store: Store) -> dict[str, Any]:
    """What was measured under max_autotune: candidates of each call with microseconds, and the choice."""
    return {"costs": table(store)}


def _source_diff(old: Path, new: Path) -> list[str]:
    texts = []
    for folder in (old, new):
        source = next((f for f in sorted(folder.iterdir()) if f.suffix in (".cpp", ".py", ".c")), None)
        texts.append(source.read_text(errors="replace").splitlines() if source else [])
    lines = list(difflib.unified_diff(texts[0], texts[1], "nearest", "this", lineterm="", n=0))
    return lines[:_DIFF_LINES] + (
        [f"... {len(lines) - _DIFF_LINES} more"] if len(lines) > _DIFF_LINES else []
    )


COMMANDS: dict[str, tuple[int, Callable[..., dict[str, Any]]]] = {  # name -> (arguments, function)
    "stats": (0, stats),
    "verify": (0, verify),
    "clear": (0, clear),
    "export": (1, export),
    "import": (1, import_),
    "why": (1, why),
    "costs": (0, costs),
}


def main(argv: list[str]) -> int:
    """Run one command and print its result."""
    words = [a for a in argv if a != "--json"]
    if not words or words[0] not in COMMANDS or len(words) - 1 != COMMANDS[words[0]][0]:
        print(USAGE, file=sys.stderr)
        return 2
    try:
        result = COMMANDS[words[0]][1](open_store(Config.make()), *words[1:])
    except (DicpError, OSError) as e:
        print(f"dicp.cache: {e}", file=sys.stderr)
        return 2
    if "--json" in argv:
        print(json.dumps(result, indent=2))
    elif words[0] == "costs":
        _show_costs(result["costs"])
    else:
        _show(result)
    return 1 if words[0] in ("verify", "import") and (result.get("removed") or result.get("refused")) else 0


def _show(result: dict[str, Any], indent: str = "") -> None:
    for name, value in result.items():
        if isinstance(value, dict):
            print(f"{indent}{name}:" + ("" if value else " none"))
            _show(value, indent + "  ")
        elif isinstance(value, list):
            print(f"{indent}{name}:" + ("" if value else " none"))
            for item in value:
                print(f"{indent}  {item}")
        else:
            print(f"{indent}{name}: {value}")


def _show_costs(rows: list[dict[str, Any]]) -> None:
    """A paragraph per call: the candidates in the heuristic's order, the choice marked."""
    for row in rows:
        print(f"{row['call']}    {row['device']}, {row['threads']} threads")
        for name, us in row["microseconds"].items():
            mark = "*" if name == row["choice"] else " "
            print(f"  {mark} {'failed' if us is None else f'{us:.1f} us':>12}  {name}")
    if not rows:
        print("nothing was measured: compile with mode='max-autotune'")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What was measured, kept in the build cache: an entry per call, device and version, as sound as others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dicp.runtime.cache import Store
from dicp.runtime.entry import Key, read_meta

KIND, FILE, FORMAT = "costs", "costs.json", "1"


@dataclass(frozen=True)
class Costs:
    """Microseconds a call by candidate, in the heuristic's order (None: it failed), and the choice."""

    microseconds: dict[str, float | None]
    choice: str

    def text(self) -> str:
        parts = [
            f"{name} {'failed' if us is None else f'{us:.1f} us'}" for name, us in self.microseconds.items()
        ]
        return f"{', '.join(parts)}: {self.choice}"


def key_of(call: str, candidates: list[str], vendor: str, device: str, threads: int) -> Key:
    """Address of a call's costs."""
    from dicp.runtime.artifact import surroundings  # it needs torch, which a list of the records does not

    return Key.of(
        kind=KIND,
        format=FORMAT,
        call=call,
        candidates="; ".join(candidates),
        vendor=vendor,
        device=device,
        threads=str(threads),
        **surroundings(),
    )


def recorded(store: Store, key: Key) -> Costs | None:
    """What an earlier process measured."""
    folder = store.get(key)
    return None if folder is None else _read(folder)


def measured(store: Store, key: Key, measure: Callable[[], Costs]) -> Costs:
    """The costs on record, else measured by one process while others wait for it."""
    made: list[Costs] = []

    def fill(folder: Path) -> None:
        made.append(measure())
        (folder / FILE).write_text(json.dumps(asdict(made[-1])))

    folder = store.get_or_build(key, fill, label=key.parts["call"])
    if made:
        return made[-1]
    return _read(folder) or measure()


def _read(folder: Path) -> Costs | None:
    """None where the entry is not what this version writes."""
    try:
        found = json.loads((folder / FILE).read_text())
        return Costs({str(k): v for k, v in found["microseconds"].items()}, str(found["choice"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def table(store: Store) -> list[dict[str, Any]]:
    """All records of a store, for people: latest used first."""
    rows = []
    for folder in reversed(store.entries()):
        meta = read_meta(folder)
        if meta is None or meta["parts"].get("kind") != KIND:
            continue
        costs = _read(folder)
        if costs is not None:
            names = ("call", "vendor", "device", "threads")
            rows.append({k: meta["parts"][k] for k in names} | asdict(costs))
    return rows

"""One entry of the build cache: a flat folder named after its key, with the checksums of what it holds.

    <digest>/unit.so  unit.cpp  ...     payload
    <digest>/meta.json                  checksum of the rest, then label, key parts, sizes and checksums

The digest is that of the parts, so an entry under a wrong name, a changed part and a changed file all show.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

META = "meta.json"


@dataclasses.dataclass(frozen=True)
class Key:
    """Address of an entry: the digest of everything that went into it."""

    digest: str
    parts: Mapping[str, str]

    @staticmethod
    def of(**parts: str) -> Key:
        """Key from named parts: source, flags, compiler, isa, torch, dicp.  Never a rank, never a path."""
        return Key(digest_of(parts), parts)


def content_hash(data: str | bytes) -> str:
    """Short stable hash of a text, for use as a key part."""
    return hashlib.blake2b(data.encode() if isinstance(data, str) else data, digest_size=16).hexdigest()


def digest_of(parts: Mapping[str, str]) -> str:
    """Digest a key's parts add up to."""
    return content_hash(json.dumps(dict(parts), sort_keys=True))


def read_meta(folder: Path) -> dict[str, Any] | None:
    """An entry's meta: label, parts, files, created; None where unreadable."""
    try:
        return parse_meta((folder / META).read_bytes())
    except (OSError, ValueError):
        return None


def inspect_entry(folder: Path) -> str | None:
    """What is wrong with an entry: None when sound, "absent" when not there."""
    try:
        with os.scandir(folder) as found:
            listing = list(found)
        payload = {}
        for item in listing:
            if not item.is_file(follow_symlinks=False):
                return f"{item.name} is not a plain file"
            with open(item.path, "rb") as f:
                payload[item.name] = f.read()
    except FileNotFoundError:
        return "absent"
    except OSError as e:
        return f"unreadable: {e.strerror}"
    return fault_of(folder.name, payload)


def fault_of(name: str, payload: Mapping[str, bytes]) -> str | None:
    """What is wrong with an entry of that name and these files, None when sound."""
    try:
        meta = parse_meta(payload.get(META, b""))
        files, parts = meta["files"], meta["parts"]
        if digest_of(parts) != name:
            return "foreign: its key is another one"
        if set(files) | {META} != set(payload):
            return "files missing or added"
        for file, (size, checksum) in files.items():
            if len(payload[file]) != size or content_hash(payload[file]) != checksum:
                return f"{file} is truncated or altered"
    except (ValueError, KeyError, TypeError) as e:
        return f"{META}: {e}"
    return None


def seal(folder: Path, key: Key, label: str) -> None:
    """Write the entry's meta: everything that lies in the folder, with size and checksum."""
    files = {}
    for item in sorted(folder.iterdir()):
        data = item.read_bytes()
        files[item.name] = (len(data), content_hash(data))
    meta = {"label": label, "parts": dict(key.parts), "files": files, "created": time.time()}
    body = json.dumps(meta, indent=1).encode()
    (folder / META).write_bytes(content_hash(body).encode() + b"\n" + body)


def parse_meta(data: bytes) -> dict[str, Any]:
    """The meta file's content; ValueError when it is damaged."""
    checksum, _, body = data.partition(b"\n")
    if content_hash(body).encode() != checksum:
        raise ValueError("checksum does not match")
    meta: dict[str, Any] = json.loads(body)
    return meta

"""Content-addressed store of built code, shared by many processes.

    <root>/v1/entries/<digest>/   see dicp/runtime/entry.py
    <root>/v1/lock/<digest>       per-key lock (flock: the kernel drops it when its holder dies)
    <root>/v1/tmp/                entries being built or thrown away

An entry appears by one rename, so it is whole or absent; its checksums are read before each use, since what
comes out gets loaded as code. Where the root cannot be written, entries go to a private temporary folder.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import functools
import io
import logging
import os
import shutil
import stat
import tarfile
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from dicp.config import Config
from dicp.errors import CacheError
from dicp.runtime.entry import META, Key, digest_of, fault_of, inspect_entry, parse_meta, read_meta, seal
from dicp.runtime.folders import locked, mtime, scratch_folder, size_of, sweep, throw_away

log = logging.getLogger("dicp.cache")

FORMAT = "v1"
LOCK_WAIT_S = 120.0
_UNWRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EFBIG}
_UNWRITABLE |= {errno.ENOENT, errno.EIO, errno.ENAMETOOLONG, errno.EMLINK, errno.ESTALE}


@dataclasses.dataclass
class Stats:
    """What one process's use of a store came to."""

    hits: int = 0
    misses: int = 0
    builds: int = 0
    waits: int = 0
    repaired: int = 0
    evicted: int = 0


def default_root(config: Config) -> Path:
    """Folder of the shared cache: `cache_dir`, else $XDG_CACHE_HOME/dicp, else ~/.cache/dicp."""
    if config.cache_dir:
        return Path(config.cache_dir).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG specification: a relative path is to be ignored
    base = Path(xdg) if os.path.isabs(xdg) else Path(os.path.expanduser("~")) / ".cache"
    return base.absolute() / "dicp"


def open_store(config: Config) -> Store:
    """The process's store for this config; its counters are shared by all who open it."""
    return _open_store(default_root(config), config.cache_size_mb << 20)


@functools.cache
def _open_store(root: Path, limit_bytes: int) -> Store:
    return Store(root, limit_bytes)


class Store:
    """Entries under one root, at most about `limit_bytes` of them."""

    def __init__(
        self, root: str | Path, limit_bytes: int = 2 << 30, lock_wait_s: float = LOCK_WAIT_S
    ) -> None:
        self.root = Path(root).absolute()
        self.limit_bytes = limit_bytes
        self.lock_wait_s = lock_wait_s
        self.stats = Stats()
        self._mutex = threading.Lock()
        self._private: Path | None = None
        self._checked = False
        self._size: int | None = None  # bytes, as far as this process knows; None: not scanned yet

    # -- use

    def get(self, key: Key) -> Path | None:
        """Folder of a sound entry, or None; damaged entries are removed on the way."""
        for home in self._homes():
            folder = home / "entries" / key.digest
            if self._sound(folder, home):
                self._count("hits")
                with contextlib.suppress(OSError):
                    os.utime(folder)  # least recently *used*
                return folder
        return None

    def get_or_build(self, key: Key, build: Callable[[Path], None], label: str = "") -> Path:
        """Folder of the entry; if there is none, `build(folder)` fills one, once among all processes.

        What `build` raises comes through, except an OSError that says the place cannot be written: then the
        build is repeated in a private folder.
        """
        if found := self.get(key):
            return found
        self._count("misses")
        for home in (self.folder(), self._private_home):
            if home is None:
                continue
            try:
                return self._build_under(home() if callable(home) else home, key, build, label)
            except OSError as e:
                if callable(home) or e.errno not in _UNWRITABLE:
                    raise CacheError(
                        f"cannot write a build under {e.filename or tempfile.gettempdir()}: {e.strerror}",
                        todo="free some space, or point DICP_CACHE_DIR or TMPDIR to a folder you can write",
                    ) from e
                _warn_once(f"cache {self.root} cannot be written ({e.strerror}); using a temporary folder")
        raise AssertionError("unreachable: the private home either returns or raises")

    def reserve(self, key: Key) -> Reservation | None:
        """The right to build an entry beside other work; None where it is there by now or another's to build,
        or this place cannot be written: then `get_or_build` is the way."""
        home = self.folder()
        if home is None:
            return None
        with contextlib.ExitStack() as held:
            try:
                _make_folders(home)
                held.enter_context(locked(home / "lock" / key.digest, None, self._waited))
                if self._sound(home / "entries" / key.digest, home):
                    return None
                folder = held.enter_context(scratch_folder(home / "tmp"))
            except OSError:
                return None
            return Reservation(self, key, home, folder, held.pop_all())

    def _build_under(self, home: Path, key: Key, build: Callable[[Path], None], label: str) -> Path:
        _make_folders(home)
        final = home / "entries" / key.digest
        with locked(home / "lock" / key.digest, self.lock_wait_s, self._waited):
            if self._sound(final, home):  # built by another between our look-up and our lock
                self._count("hits")
                return final
            with scratch_folder(home / "tmp") as scratch:
                build(scratch)
                self.enter(scratch, key, label, home)
        return final

    def enter(self, scratch: Path, key: Key, label: str, home: Path) -> Path:
        """Make an entry of a filled folder."""
        final = home / "entries" / key.digest
        seal(scratch, key, label)
        self._count("builds")
        size = size_of(scratch)
        self._publish(scratch, final, home)
        self._trim(home, size, keep=key.digest)
        return final

    def _publish(self, scratch: Path, final: Path, home: Path) -> None:
        for _ in range(8):
            try:
                os.rename(scratch, final)
                return
            except OSError as e:
                if e.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
            # another process published first (it went on alone), or rubbish lies in the way
            if self._sound(final, home):
                return
        raise CacheError(f"cannot publish {final}: something keeps recreating it", todo="remove that folder")

    # -- places

    def _homes(self) -> list[Path]:
        return [h for h in (self.folder(), self._private) if h is not None]

    def folder(self) -> Path | None:
        """The shared home, made and checked; None where it cannot be made, CacheError where it is unsafe."""
        home = self.root / FORMAT
        if not self._checked:
            try:
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
                _check_private(self.root)
                home.mkdir(mode=0o700, exist_ok=True)
            except OSError as e:
                if not os.path.isdir(self.root):  # Path.is_dir raises where the name is too long
                    _warn_once(f"cache {self.root} cannot be made ({e.strerror}); using a temporary folder")
                    return None
            if home.exists():
                _check_private(home)
            self._checked = True
        return home

    def _private_home(self) -> Path:
        """This process's own folder, removed when it ends."""
        with self._mutex:
            if self._private is None:
                try:
                    self._private = Path(tempfile.mkdtemp(prefix="dicp-"))
                except OSError as e:
                    raise CacheError(
                        f"neither {self.root} nor a temporary folder can be written: {e.strerror or e}",
                        todo="free some space, or point DICP_CACHE_DIR or TMPDIR to a folder you can write",
                    ) from e
                atexit.register(_remove_if_mine, self._private, os.getpid())
            return self._private

    def keep_failed(self, name: str, text: str) -> Path:
        """Keep a source that did not build where the user can read it; the latest 32 stay."""
        for base in (self.root / FORMAT / "failed", None):
            try:
                if base is None:
                    base = Path(tempfile.mkdtemp(prefix="dicp-failed-"))
                base.mkdir(mode=0o700, parents=True, exist_ok=True)
                path = base / name
                path.write_text(text)
                kept = sorted(base.iterdir(), key=mtime)
                for old in kept[:-32]:
                    old.unlink(missing_ok=True)
                return path
            except OSError:
                continue
        return Path(name)

    # -- soundness

    def _sound(self, folder: Path, home: Path) -> bool:
        """Whether the entry is there and undamaged; a damaged one is thrown away."""
        fault = inspect_entry(folder)
        if fault is None:
            return True
        if fault != "absent":
            log.info("cache entry %s is damaged (%s): rebuilding", folder.name, fault)
            self._count("repaired")
            throw_away(folder, home / "tmp")
        return False

    def _count(self, name: str) -> None:
        with self._mutex:
            setattr(self.stats, name, getattr(self.stats, name) + 1)

    def _waited(self) -> None:
        self._count("waits")

    # -- size

    def entries(self) -> list[Path]:
        """Folders of all entries, least recently used first."""
        found = [
            e for home in self._homes() if (home / "entries").is_dir() for e in (home / "entries").iterdir()
        ]
        return sorted(found, key=mtime)

    def part_values(self, part: str) -> list[str]:
        """Values one key part has among the entries, latest used first."""
        metas = [meta for e in reversed(self.entries()) if (meta := read_meta(e)) is not None]
        return list(dict.fromkeys(meta["parts"][part] for meta in metas if part in meta["parts"]))

    def _trim(self, home: Path, added: int, keep: str) -> None:
        """Evict least recently used entries once the limit is passed, down to 80 % of it."""
        with self._mutex:
            if self._size is not None:
                self._size += added
            if self._size is not None and self._size <= self.limit_bytes:
                return
        with contextlib.suppress(OSError):
            self._size = self._evict(home, keep)

    def _evict(self, home: Path, keep: str) -> int:
        sweep(home / "tmp")
        sizes = {e: size_of(e) for e in (home / "entries").iterdir()}
        total = sum(sizes.values())
        if total <= self.limit_bytes:
            return total
        for entry in sorted(sizes, key=mtime):
            if total <= self.limit_bytes * 8 // 10:
                break
            if entry.name != keep:
                throw_away(entry, home / "tmp")
                self._count("evicted")
                total -= sizes[entry]
        return total

    # -- the command line's needs

    def verify(self) -> dict[str, str]:
        """Damaged entries and why; each is removed."""
        bad = {}
        for entry in self.entries():
            fault = inspect_entry(entry)
            if fault is not None and fault != "absent":
                bad[entry.name] = fault
                throw_away(entry, entry.parent.parent / "tmp")
        return bad

    def clear(self) -> int:
        """Remove every entry; the number removed."""
        gone = self.entries()
        for entry in gone:
            throw_away(entry, entry.parent.parent / "tmp")
        for home in self._homes():
            sweep(home / "tmp")
            shutil.rmtree(home / "failed", ignore_errors=True)
        self._size = None
        return len(gone)

    def pack(self, digests: Iterable[str] | None = None) -> bytes:
        """Sound entries (all, or the named ones) as one gzipped tar."""
        wanted = None if digests is None else set(digests)
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz", compresslevel=3) as tar:
            for entry in self.entries():
                if (wanted is None or entry.name in wanted) and inspect_entry(entry) is None:
                    for file in sorted(entry.iterdir()):
                        info = tarfile.TarInfo(f"{entry.name}/{file.name}")
                        data = file.read_bytes()
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
        return out.getvalue()

    def unpack(self, archive: bytes) -> tuple[list[str], list[str]]:
        """Add a pack's entries; (digests present afterwards, digests refused as damaged or foreign).

        A pack holds code that gets loaded: take it only from whom you would take a program.
        """
        files: dict[str, dict[str, bytes]] = {}
        try:
            with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
                for member in tar:
                    parts = member.name.split("/")
                    stream = tar.extractfile(member) if member.isreg() and len(parts) == 2 else None
                    if stream is None or any(p in ("", ".", "..") for p in parts):
                        raise CacheError(f"not a dicp cache archive: member {member.name!r}")
                    files.setdefault(parts[0], {})[parts[1]] = stream.read()
        except (tarfile.TarError, OSError, EOFError, zlib.error) as e:
            raise CacheError(
                f"not a dicp cache archive, or a damaged one: {e}", todo="export it again"
            ) from e
        added: list[str] = []
        refused: list[str] = []
        for name, payload in files.items():
            (added if self._add(name, payload) else refused).append(name)
        return added, refused

    def _add(self, name: str, payload: dict[str, bytes]) -> bool:
        try:
            meta = parse_meta(payload.get(META, b""))
            key = Key(digest_of(meta["parts"]), meta["parts"])
        except (ValueError, KeyError, TypeError):
            return False
        if key.digest != name or fault_of(name, payload) is not None:
            return False

        def write(folder: Path) -> None:
            for file, data in payload.items():
                if file != META:
                    (folder / file).write_bytes(data)

        self.get_or_build(key, write, str(meta.get("label", "")))
        return True


# -- files


def _check_private(folder: Path) -> None:
    """Refuse a folder others could write to: what lies in it gets loaded as code."""
    info = folder.stat()
    if not hasattr(os, "geteuid"):
        return
    if info.st_uid != os.geteuid():
        raise CacheError(
            f"cache folder {folder} belongs to user id {info.st_uid}, not to you ({os.geteuid()}); "
            "code in it would run as you",
            todo="set DICP_CACHE_DIR to a folder of your own, or chown that one",
        )
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(
            f"cache folder {folder} can be written by others (mode {stat.S_IMODE(info.st_mode):04o}); "
            "code in it would run as you",
            todo=f"chmod 700 {folder}, or set DICP_CACHE_DIR to a folder only you can write",
        )


@dataclasses.dataclass
class Reservation:
    """An entry that this process alone builds, in `folder`, until it is published or released."""

    store: Store
    key: Key
    home: Path
    folder: Path
    held: contextlib.ExitStack

    def publish(self, label: str = "") -> Path:
        """Make an entry of what is in the folder now. Raises OSError, CacheError."""
        with self.held:
            return self.store.enter(self.folder, self.key, label, self.home)

    def release(self) -> None:
        self.held.close()


def _make_folders(home: Path) -> None:
    for sub in ("entries", "lock", "tmp"):
        (home / sub).mkdir(mode=0o700, parents=True, exist_ok=True)


def _remove_if_mine(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child inherits the exit hook, not the folder
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)

"""Folders of a store that several processes use: locks, folders being filled, folders thrown away."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

log = logging.getLogger("dicp.cache")

STALE_TMP_S = 60.0
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


@contextlib.contextmanager
def locked(path: Path, wait_s: float | None, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a key. wait_s: None raises OSError where another holds it. on_wait: called before it
    waits.

    After `wait_s` goes on without: a second build of the same thing is wasteful, never wrong.
    """
    deadline = time.monotonic() + (wait_s or 0.0)
    pause, waited, fd = 0.001, False, None
    try:
        while fd is None:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                if e.errno in _NO_LOCKS:
                    break
                if e.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                    raise
                os.close(fd)
                fd = None
                if wait_s is None:
                    raise
                if not waited:
                    waited = True
                    on_wait()
                if time.monotonic() > deadline:
                    log.warning("waited %.0f s for another process's build; going on alone", wait_s)
                    break
                time.sleep(pause)
                pause = min(pause * 1.5, 0.025)
                continue
            if not _is_at(fd, path):  # its former holder unlinked it: this inode locks nothing now
                os.close(fd)
                fd = None
        yield
    finally:
        if fd is not None:
            with contextlib.suppress(OSError):
                if _is_at(fd, path):
                    os.unlink(path)
            os.close(fd)


@contextlib.contextmanager
def scratch_folder(tmp: Path) -> Iterator[Path]:
    """A fresh folder under `tmp`, locked while in use so that others can tell it from a dead one's."""
    folder = Path(tempfile.mkdtemp(prefix="b-", dir=tmp))
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        os.close(fd)
        shutil.rmtree(folder, ignore_errors=True)


def throw_away(folder: Path, tmp: Path) -> None:
    """Remove an entry in one step (rename), then its files; losing a race to another remover is fine."""
    with contextlib.suppress(OSError):
        tmp.mkdir(mode=0o700, parents=True, exist_ok=True)
        grave = Path(tempfile.mkdtemp(prefix="d-", dir=tmp))
        with contextlib.suppress(OSError):
            os.rename(folder, grave / "x")
        shutil.rmtree(grave, ignore_errors=True)


def sweep(tmp: Path) -> None:
    """Remove scratch folders whose process died: nobody holds their lock."""
    if not tmp.is_dir():
        return
    for folder in tmp.iterdir():
        # the age covers the moment between mkdir and flock; a jumping clock can only delay the sweep
        if abs(time.time() - mtime(folder)) < STALE_TMP_S:
            continue
        with contextlib.suppress(OSError):
            fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file is still the one its path names."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False


def mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def size_of(folder: Path) -> int:
    try:
        return sum(f.stat().st_size for f in folder.iterdir()) if folder.is_dir() else folder.stat().st_size
    except OSError:
        return 0

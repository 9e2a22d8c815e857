from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dicp.config import Config
from dicp.errors import CacheError
from dicp.runtime import cache
from dicp.runtime.cache import Store, default_root, open_store
from dicp.runtime.entry import META, Key, inspect_entry

FORK = multiprocessing.get_context("fork")


def writer(
    data: bytes = b"payload" * 100, log: Path | None = None, seconds: float = 0
) -> Callable[[Path], None]:
    """A build that writes one file, and one letter to `log` each time it runs."""

    def build(folder: Path) -> None:
        if log is not None:
            with open(log, "a") as f:
                f.write("x")
        (folder / "unit.so").write_bytes(data[: len(data) // 2])
        time.sleep(seconds)
        (folder / "unit.so").write_bytes(data)

    return build


def refuse(folder: Path) -> None:
    raise AssertionError("must not be built again")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


KEY = Key.of(source="s", flags="-O3", compiler="g++ 12")


# -- keys and hits


def test_miss_then_hit_and_a_new_process_hits(store: Store) -> None:
    folder = store.get_or_build(KEY, writer(), label="k0")
    assert (folder / "unit.so").read_bytes() == b"payload" * 100
    assert store.get_or_build(KEY, refuse) == folder
    assert Store(store.root).get_or_build(KEY, refuse) == folder
    assert (store.stats.misses, store.stats.builds, store.stats.hits) == (1, 1, 1)


def test_every_part_changes_the_key_and_order_does_not() -> None:
    base = {"source": "s", "flags": "f", "compiler": "c", "isa": "avx2", "torch": "2.13", "dicp": "0.1"}
    assert Key.of(**base).digest == Key.of(**dict(reversed(base.items()))).digest
    digests = {Key.of(**{**base, name: base[name] + "x"}).digest for name in base}
    assert len(digests | {Key.of(**base).digest}) == len(base) + 1


def test_a_failing_build_leaves_nothing(store: Store) -> None:
    def fails(folder: Path) -> None:
        (folder / "unit.so").write_bytes(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.get_or_build(KEY, fails)
    assert store.entries() == []
    assert list((store.root / "v1" / "tmp").iterdir()) == []
    assert list((store.root / "v1" / "lock").iterdir()) == []
    store.get_or_build(KEY, writer())


def test_an_entry_is_never_seen_half_written(store: Store) -> None:
    seen: list[str | None] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(inspect_entry(store.root / "v1" / "entries" / KEY.digest))

    watcher = threading.Thread(target=watch)
    watcher.start()
    store.get_or_build(KEY, writer(b"z" * 5_000_000, seconds=0.05))
    done.set()
    watcher.join()
    assert set(seen) <= {"absent", None} and "absent" in seen


# -- damage


def truncate(entry: Path) -> None:
    path = entry / "unit.so"
    path.write_bytes(path.read_bytes()[:-1])


def empty(entry: Path) -> None:
    (entry / "unit.so").write_bytes(b"")


def flip_payload(entry: Path) -> None:
    flip(entry / "unit.so", 13)


def flip_meta(entry: Path) -> None:
    flip(entry / META, 200)


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def drop_meta(entry: Path) -> None:
    (entry / META).unlink()


def empty_meta(entry: Path) -> None:
    (entry / META).write_bytes(b"")


def drop_payload(entry: Path) -> None:
    (entry / "unit.so").unlink()


def add_file(entry: Path) -> None:
    (entry / "extra.so").write_bytes(b"?")


def link_payload(entry: Path) -> None:
    shutil.copy(entry / "unit.so", entry.parent / "elsewhere")
    (entry / "unit.so").unlink()
    (entry / "unit.so").symlink_to(entry.parent / "elsewhere")


def foreign(entry: Path) -> None:
    """A sound entry, of another key, under this name."""
    other = Store(entry.parents[2]).get_or_build(Key.of(source="other"), writer(b"other code"))
    shutil.rmtree(entry)
    shutil.copytree(other, entry)


def plain_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_bytes(b"rubbish")


def empty_folder(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.mkdir()


DAMAGES = [truncate, empty, flip_payload, flip_meta, drop_meta, empty_meta, drop_payload, add_file]
DAMAGES += [link_payload, foreign, plain_file, empty_folder]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_damage_is_found_removed_and_rebuilt(damage: Callable[[Path], None], store: Store) -> None:
    entry = store.get_or_build(KEY, writer())
    damage(entry)
    assert inspect_entry(entry) not in (None, "absent")
    assert store.get(KEY) is None
    assert not entry.exists() and store.stats.repaired == 1
    damaged_again = store.get_or_build(KEY, writer())
    assert (damaged_again / "unit.so").read_bytes() == b"payload" * 100
    damage(entry)
    assert KEY.digest in store.verify()
    assert store.verify() == {}


def test_damage_while_the_lock_is_awaited_is_repaired_too(store: Store) -> None:
    (store.root / "v1" / "entries" / KEY.digest).mkdir(parents=True, mode=0o700)
    os.chmod(store.root, 0o700)
    (store.root / "v1" / "entries" / KEY.digest / "unit.so").write_bytes(b"bad")
    assert (store.get_or_build(KEY, writer()) / "unit.so").read_bytes() == b"payload" * 100


@pytest.mark.slow
def test_two_thousand_damaged_entries(store: Store) -> None:
    dice = random.Random(0)
    for i in range(2000):
        key = Key.of(source=str(i))
        entry = store.get_or_build(key, writer(b"%d" % i * 50))
        if i % 2:
            dice.choice([d for d in DAMAGES if d is not foreign and d is not link_payload])(entry)
        else:
            victim = dice.choice(["unit.so", META])
            flip(entry / victim, dice.randrange(8 * (entry / victim).stat().st_size))
    for i in range(2000):
        entry = store.get_or_build(Key.of(source=str(i)), writer(b"%d" % i * 50))
        assert (entry / "unit.so").read_bytes() == b"%d" % i * 50
    assert store.stats.repaired == 2000


# -- who may write


@contextlib.contextmanager
def as_ordinary_user() -> Iterator[None]:
    """File permissions do not bind root: drop to another effective user meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_dir(tmp_path: Path) -> Iterator[Path]:
    """A folder any user reaches."""
    import tempfile

    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def test_root_is_made_for_its_owner_only(store: Store) -> None:
    store.get_or_build(KEY, writer())
    for folder in (store.root, store.root / "v1", store.root / "v1" / "entries"):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777])
@pytest.mark.parametrize("inner", [False, True])
def test_folder_others_can_write_is_refused(mode: int, inner: bool, tmp_path: Path) -> None:
    first = Store(tmp_path / "c")
    first.get_or_build(KEY, writer())
    (first.root / "v1" if inner else first.root).chmod(mode)
    with pytest.raises(CacheError, match="can be written by others") as raised:
        Store(tmp_path / "c").get(KEY)
    assert "chmod 700" in str(raised.value)


def test_folder_of_another_user_is_refused(open_dir: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's folder")
    root = open_dir / "c"
    Store(root).get_or_build(KEY, writer())
    os.chown(root, 12345, 12345)
    with pytest.raises(CacheError, match="belongs to user id 12345"):
        Store(root).get(KEY)


def test_read_only_cache_still_serves_and_new_builds_go_elsewhere(
    open_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with as_ordinary_user():
        root = open_dir / "c"
        entry = Store(root).get_or_build(KEY, writer())
        folders = [root, root / "v1", *(root / "v1").iterdir(), entry]
        try:
            for folder in folders:
                folder.chmod(0o500)
            store = Store(root)
            assert store.get_or_build(KEY, refuse) == entry
            with caplog.at_level(logging.WARNING):
                for i in range(5):
                    new = Key.of(source=str(i))
                    built = store.get_or_build(new, writer(b"new"))
                    assert root not in built.parents and (built / "unit.so").read_bytes() == b"new"
                    assert store.get_or_build(new, refuse) == built
            assert len(caplog.records) == 1 and "cannot be written" in caplog.text
            private = store._private
            assert private is not None and private.stat().st_mode & 0o777 == 0o700
            cache._remove_if_mine(private, os.getpid())
        finally:
            for folder in folders:
                folder.chmod(0o700)


def test_a_name_that_is_too_long(open_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(open_dir / ("c" * 300))
    with caplog.at_level(logging.WARNING):
        built = store.get_or_build(KEY, writer())
    assert (built / "unit.so").exists() and "cannot be made (File name too long)" in caplog.text


def test_unwritable_home(
    open_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("DICP_CACHE_DIR")
    monkeypatch.setenv("HOME", "/proc/nowhere")
    store = Store(default_root(Config.make()))
    with caplog.at_level(logging.WARNING):
        built = store.get_or_build(KEY, writer())
    assert (built / "unit.so").exists() and "/proc" not in str(built)
    assert len(caplog.records) == 1


def test_full_disk_goes_to_the_temporary_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    try:
        store = Store(disk)
        big = os.urandom(1 << 20)
        with caplog.at_level(logging.WARNING):
            built = store.get_or_build(KEY, writer(big))
        assert (built / "unit.so").read_bytes() == big and disk not in built.parents
        assert "No space left" in caplog.text
        small = store.get_or_build(Key.of(source="small"), writer(b"fits"))
        assert disk in small.parents, "the failed build's half is gone again"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_full_disk_reported_by_the_build(store: Store) -> None:
    places = []

    def build(folder: Path) -> None:
        places.append(folder)
        if store.root in folder.parents:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        writer()(folder)

    store.get_or_build(KEY, build)
    assert len(places) == 2


def test_nowhere_to_write_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(**_: object) -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(cache.tempfile, "mkdtemp", none)
    with pytest.raises(CacheError, match="neither .* nor a temporary folder can be written"):
        Store("/proc/nowhere").get_or_build(KEY, writer())


def test_default_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert default_root(Config.make()) == tmp_path / "cache"
    monkeypatch.delenv("DICP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_root(Config.make()) == Path("/x/dicp")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/u")
    assert default_root(Config.make()) == Path("/home/u/.cache/dicp")
    assert open_store(Config.make(None, {"cache_dir": str(tmp_path)})).root == tmp_path


# -- size


def test_least_recently_used_go_first(tmp_path: Path) -> None:
    keys = [Key.of(source=str(i)) for i in range(8)]
    store = Store(tmp_path / "c", limit_bytes=10 << 20)
    for i, key in enumerate(keys):
        entry = store.get_or_build(key, writer(b"x" * 10_000))
        os.utime(entry, (1000 + i, 1000 + i))
    store.get(keys[0])  # used again: now the latest
    store = Store(tmp_path / "c", limit_bytes=60_000)
    store.get_or_build(Key.of(source="new"), writer(b"x" * 10_000))
    alive = [i for i, key in enumerate(keys) if store.get(key)]
    assert alive == [0, 6, 7] and store.get(Key.of(source="new"))
    assert store.stats.evicted == 5


def test_an_entry_larger_than_the_limit_is_still_served(tmp_path: Path) -> None:
    store = Store(tmp_path / "c", limit_bytes=100)
    for i in range(3):
        assert (store.get_or_build(Key.of(source=str(i)), writer()) / "unit.so").exists()
    assert len(store.entries()) == 1


@pytest.mark.parametrize("jump", [-4e8, 4e8])
def test_a_jumping_clock_only_changes_the_order_of_eviction(jump: float, tmp_path: Path) -> None:
    store = Store(tmp_path / "c", limit_bytes=100_000)
    for i in range(30):
        entry = store.get_or_build(Key.of(source=str(i)), writer(b"x" * 10_000))
        os.utime(entry, (time.time() + jump * (i % 3), time.time() + jump * (i % 3)))
        assert (store.get_or_build(Key.of(source=str(i)), writer(b"x" * 10_000)) / "unit.so").exists()
    assert sum(f.stat().st_size for e in store.entries() for f in e.iterdir()) <= 120_000


# -- many processes


def _race(root: Path, log: Path, keys: int, start: float) -> None:
    time.sleep(max(0.0, start - time.time()))
    store = Store(root)
    for i in range(keys):
        entry = store.get_or_build(Key.of(source=str(i)), writer(b"%d" % i * 99, log / str(i), seconds=0.01))
        assert (entry / "unit.so").read_bytes() == b"%d" % i * 99


def test_racing_processes_build_each_key_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    start = time.time() + 0.3
    racers = [FORK.Process(target=_race, args=(tmp_path / "c", log, 12, start)) for _ in range(16)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0
    assert [(log / str(i)).read_text() for i in range(12)] == ["x"] * 12
    assert list((tmp_path / "c" / "v1" / "lock").iterdir()) == []
    assert list((tmp_path / "c" / "v1" / "tmp").iterdir()) == []


def test_racing_threads_build_once(store: Store, tmp_path: Path) -> None:
    log = tmp_path / "log"
    threads = [
        threading.Thread(target=lambda: store.get_or_build(KEY, writer(log=log, seconds=0.05)))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.read_text() == "x" and store.stats.waits > 0


def test_killed_builder_hands_over_at_once(store: Store, tmp_path: Path) -> None:
    log = tmp_path / "log"
    builder = FORK.Process(
        target=lambda: Store(store.root).get_or_build(KEY, writer(b"old", log=log, seconds=60))
    )
    builder.start()
    wait_for(log.exists)
    waiter = threading.Thread(target=lambda: store.get_or_build(KEY, writer(b"new")))
    waiter.start()
    time.sleep(0.1)
    assert waiter.is_alive(), "the lock is held"
    assert builder.pid is not None
    os.kill(builder.pid, signal.SIGKILL)
    builder.join()
    waiter.join(5)
    assert not waiter.is_alive()
    entry = store.get(KEY)
    assert entry is not None and (entry / "unit.so").read_bytes() == b"new"


def test_a_lock_file_unlinked_between_open_and_lock_is_not_trusted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.root / "v1" / "lock" / KEY.digest
    lock, unlinked = fcntl.flock, []

    def unlink_first(fd: int, how: int) -> None:
        if not unlinked and path.exists():
            unlinked.append(path.unlink())
        lock(fd, how)

    def build(folder: Path) -> None:
        with open(path) as rival, pytest.raises(BlockingIOError):
            lock(rival, fcntl.LOCK_EX | fcntl.LOCK_NB)
        writer()(folder)

    monkeypatch.setattr(fcntl, "flock", unlink_first)
    store.get_or_build(KEY, build)
    assert unlinked


def test_waiting_for_a_stopped_builder_is_bounded(store: Store, tmp_path: Path) -> None:
    log = tmp_path / "log"
    builder = FORK.Process(
        target=lambda: Store(store.root).get_or_build(KEY, writer(b"old", log=log, seconds=60))
    )
    builder.start()
    wait_for(log.exists)
    assert builder.pid is not None
    os.kill(builder.pid, signal.SIGSTOP)
    store.lock_wait_s = 0.2
    start = time.monotonic()
    entry = store.get_or_build(KEY, writer(b"alone"))
    assert time.monotonic() - start < 3
    assert (entry / "unit.so").read_bytes() == b"alone"
    os.kill(builder.pid, signal.SIGKILL)
    builder.join()


def test_a_late_publisher_finds_the_entry_there(store: Store) -> None:
    def build(folder: Path) -> None:
        other = Store(store.root, lock_wait_s=0.0)
        other.get_or_build(KEY, writer(b"first"))
        writer(b"second")(folder)

    entry = store.get_or_build(KEY, build)
    assert (entry / "unit.so").read_bytes() == b"first"


def test_a_reserved_entry_is_built_beside_other_work(store: Store) -> None:
    entry = store.reserve(KEY)
    assert entry is not None
    assert store.reserve(KEY) is None and Store(store.root).reserve(KEY) is None
    (entry.folder / "unit.so").write_bytes(b"mine")
    assert store.get(KEY) is None
    published = entry.publish("label")
    assert store.get(KEY) == published and (published / "unit.so").read_bytes() == b"mine"
    assert store.stats.builds == 1 and list((store.root / "v1" / "tmp").iterdir()) == []
    assert store.reserve(KEY) is None


def test_a_released_reservation_leaves_the_build_to_others(store: Store) -> None:
    entry = store.reserve(KEY)
    assert entry is not None
    (entry.folder / "unit.so").write_bytes(b"half")
    entry.release()
    start = time.monotonic()
    built = Store(store.root).get_or_build(KEY, writer(b"whole"))
    assert (built / "unit.so").read_bytes() == b"whole" and time.monotonic() - start < 5
    assert [f.name for f in (store.root / "v1" / "tmp").iterdir()] == []


def test_where_nothing_can_be_written_nothing_is_reserved(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Store(tmp_path / "file" / "c").reserve(KEY) is None


def test_leftovers_of_the_dead_are_swept(store: Store) -> None:
    store.get_or_build(KEY, writer())
    dead = store.root / "v1" / "tmp" / "b-dead"
    dead.mkdir()
    (dead / "unit.so").write_bytes(b"half")
    os.utime(dead, (1000, 1000))
    Store(store.root).get_or_build(Key.of(source="next"), writer())
    assert not dead.exists()


def test_a_living_builder_is_not_swept_when_the_clock_jumps(store: Store) -> None:
    def build(folder: Path) -> None:
        os.utime(folder, (1000, 1000))
        Store(store.root).get_or_build(Key.of(source="next"), writer())
        writer()(folder)

    assert store.get_or_build(KEY, build).is_dir()
    assert store.root in store.get_or_build(KEY, refuse).parents


def test_cache_removed_while_building(store: Store) -> None:
    def build(folder: Path) -> None:
        if store.root in folder.parents:
            shutil.rmtree(store.root)
        writer()(folder)

    assert (store.get_or_build(KEY, build) / "unit.so").exists()


def _build_forever(root: Path) -> None:
    store = Store(root, limit_bytes=40_000)
    while True:
        i = random.randrange(10)
        entry = store.get_or_build(Key.of(source=str(i)), writer(b"%d" % i * 5000))
        data = b"" if not entry.exists() else (entry / "unit.so").read_bytes()
        assert data in (b"%d" % i * 5000, b""), "a served entry is wrong"


def _kill_at_random(tmp_path: Path, times: int) -> None:
    root, dice = tmp_path / "c", random.Random(1)
    for _ in range(times):
        victim = FORK.Process(target=_build_forever, args=(root,))
        victim.start()
        time.sleep(dice.uniform(0.0, 0.03))
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        assert victim.exitcode == -signal.SIGKILL
    store = Store(root, lock_wait_s=5)
    for i in range(10):
        entry = store.get_or_build(Key.of(source=str(i)), writer(b"%d" % i * 5000))
        assert (entry / "unit.so").read_bytes() == b"%d" % i * 5000
    assert store.stats.repaired == 0, "a kill never leaves a damaged entry behind"


def test_kill_at_any_moment(tmp_path: Path) -> None:
    _kill_at_random(tmp_path, 40)


@pytest.mark.slow
def test_five_hundred_kills(tmp_path: Path) -> None:
    _kill_at_random(tmp_path, 500)


# -- moving entries


def test_pack_and_unpack(store: Store, tmp_path: Path) -> None:
    keys = [Key.of(source=str(i)) for i in range(3)]
    for key in keys:
        store.get_or_build(key, writer(key.digest.encode()))
    other = Store(tmp_path / "other")
    added, refused = other.unpack(store.pack())
    assert sorted(added) == sorted(k.digest for k in keys) and refused == []
    for key in keys:
        assert (other.get_or_build(key, refuse) / "unit.so").read_bytes() == key.digest.encode()
    assert Store(tmp_path / "third").unpack(store.pack([keys[1].digest]))[0] == [keys[1].digest]


def test_unpack_refuses_what_is_damaged_or_climbs_out(store: Store, tmp_path: Path) -> None:
    import io
    import tarfile

    store.get_or_build(KEY, writer())
    archive = store.pack()
    with pytest.raises(CacheError, match="not a dicp cache archive"):
        store.unpack(b"not a tar")
    with pytest.raises(CacheError, match="not a dicp cache archive"):
        store.unpack(archive[: len(archive) // 2])

    def tar(name: str, data: bytes) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz") as t:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            t.addfile(info, io.BytesIO(data))
        return out.getvalue()

    for name in ("../evil", "/etc/evil", "a/../b", "a/b/c", "plain"):
        with pytest.raises(CacheError):
            Store(tmp_path / "o").unpack(tar(name, b"x"))
    assert Store(tmp_path / "o").unpack(tar(f"{KEY.digest}/unit.so", b"x")) == ([], [KEY.digest])


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.005)

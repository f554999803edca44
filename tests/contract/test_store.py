"""The suite of all stores (`store_suite`) in memory, and as files by symlinks, by hard links, and by exclusive creation
alone, on this machine's disk and on emulated NFS, where each participant has a mount of its own; then what `FileStore`
makes of filesystems that refuse, lose replies, or hold what others put there."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.errors import UnsafePathError
from hpc_elastic.store import file_store
from hpc_elastic.store.file_store import FileStore, StoreError, StoreFullError
from tests.contract.store_suite import ProcessSuite, StoreSuite, Subject, wait_for_second
from tests.rigs.fake_clock import FakeClock
from tests.rigs.memory_store import MemoryStore
from tests.rigs.nfs_emulator import MountSettings, NfsEmulator, require_fuse

NUMBERS = itertools.count()
KINDS = ("symlinks", "hard links", "exclusive creation")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")

Hook = Callable[..., Any]


class Filesystem:
    """Stands where `os` does in file_store: passes everything on, but for the calls that a test takes over."""

    def __init__(self, *, symlinks: bool = True, hard_links: bool = True, refusal: int = errno.EOPNOTSUPP) -> None:
        self.hooks: dict[str, Hook] = {}
        self.calls: list[str] = []
        if not symlinks:
            self.hooks["symlink"] = self.refuse(refusal)
        if not hard_links:
            self.hooks["link"] = self.refuse(refusal)

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        hook = self.hooks.get(name)
        if hook is None:
            return real

        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return hook(real, *args, **kwargs)

        return called

    @staticmethod
    def refuse(number: int, *, times: int | None = None) -> Hook:
        """Fail without doing it; `times` calls, or always."""
        left = [times]

        def hook(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if left[0] is not None:
                if left[0] == 0:
                    return real(*args, **kwargs)
                left[0] -= 1
            raise OSError(number, os.strerror(number))

        return hook

    @staticmethod
    def lose_reply(number: int) -> Hook:
        """Do it, and say once that it failed: the server's answer was lost."""
        lost = [False]

        def hook(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            if not lost[0]:
                lost[0] = True
                raise OSError(number, os.strerror(number))
            return result

        return hook


def filesystem(kind: str) -> Filesystem:
    return Filesystem(symlinks=kind == "symlinks", hard_links=kind != "exclusive creation")


@pytest.fixture(params=KINDS)
def fs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Filesystem:
    """A filesystem that can create in one way, or in more."""
    found = filesystem(request.param)
    monkeypatch.setattr(file_store, "os", found)
    return found


@pytest.fixture
def plain_fs(monkeypatch: pytest.MonkeyPatch) -> Filesystem:
    """One that has symlinks."""
    found = Filesystem()
    monkeypatch.setattr(file_store, "os", found)
    return found


@pytest.fixture
def files(fs: Filesystem, tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store", clock=FakeClock())


def caches(seconds: float, **more: Any) -> MountSettings:
    return MountSettings(attributes=seconds, directories=seconds, **more)


NFS = {
    "nfs: symlinks, 3 s": ("symlinks", caches(3.0)),
    "nfs: hard links, 3 s": ("hard links", caches(3.0)),
    "nfs: exclusive creation, 3 s": ("exclusive creation", caches(3.0)),
    "nfs: symlinks, 60 s": ("symlinks", caches(60.0)),
    "nfs: symlinks, 60 s, lost replies": ("symlinks", caches(60.0)),
    "nfs: hard links, 60 s, lost replies": ("hard links", caches(60.0)),
    "nfs: symlinks, 3 s, times of 1 s": ("symlinks", caches(3.0, granularity=1.0)),
}
"""How values are created, and what the clients cache."""


@pytest.fixture(scope="session")
def emulators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[MountSettings], NfsEmulator]]:
    """One pair of mounts for each set of settings."""
    require_fuse()
    started: dict[MountSettings, NfsEmulator] = {}
    with ExitStack() as stack:

        def emulator(settings: MountSettings) -> NfsEmulator:
            if settings not in started:
                backing = tmp_path_factory.mktemp("server")
                started[settings] = stack.enter_context(NfsEmulator(backing, settings=settings))
            started[settings].heal()
            return started[settings]

        yield emulator


@pytest.fixture(params=("memory", *KINDS, *NFS))
def subject(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    """The same store for one participant after another, on NFS on one mount after another."""
    if request.param == "memory":
        shared = MemoryStore()
        yield Subject(open=lambda: shared)
        return
    if request.param in KINDS:
        monkeypatch.setattr(file_store, "os", filesystem(request.param))
        yield Subject(open=lambda: FileStore(tmp_path / "store", clock=SystemClock()))
        return
    kind, settings = NFS[request.param]
    monkeypatch.setattr(file_store, "os", filesystem(kind))
    emulator = request.getfixturevalue("emulators")(settings)
    mounts = itertools.cycle(emulator.paths)
    name = f"store-{next(NUMBERS)}"
    if "lost replies" in request.param:
        for operation in ("symlink", "link"):
            emulator.fail("EIO", operation, done=True)  # all of them
    coarse = settings.granularity == 1.0
    yield Subject(
        open=lambda: FileStore(next(mounts) / name, clock=SystemClock()),
        **({"tick": wait_for_second} if coarse else {}),
    )
    emulator.heal()


class TestAnyStore(StoreSuite):
    """In memory, on this machine's disk, on emulated NFS."""


@pytest.mark.parametrize(
    "subject",
    [*KINDS, "nfs: symlinks, 3 s", "nfs: exclusive creation, 3 s", "nfs: symlinks, 60 s, lost replies"],
    indirect=True,
)
class TestInProcesses(ProcessSuite):
    """On this machine's disk, on emulated NFS."""


# -- what filesystems do


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EEXIST, errno.ETIMEDOUT], ids=errno.errorcode.get)
@pytest.mark.parametrize(("kind", "create"), [("symlinks", "symlink"), ("hard links", "link")])
def test_a_lost_reply_is_no_loss(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, create: str, number: int
) -> None:
    fs = filesystem(kind)
    monkeypatch.setattr(file_store, "os", fs)
    files = FileStore(tmp_path / "store", clock=FakeClock())
    files.make_folder("log")
    fs.hooks[create] = Filesystem.lose_reply(number)
    assert files.put_if_absent("log/1", "mine") is True
    assert files.get("log/1") == "mine"
    assert fs.calls.count(create) == 1, "not tried again"
    assert not [name for name in os.listdir(Path(files.root) / "log") if name.startswith(".")], "nothing left behind"


def test_a_lost_reply_is_no_loss_even_where_the_first_look_fails_too(plain_fs: Filesystem, tmp_path: Path) -> None:
    files = FileStore(tmp_path / "store", clock=FakeClock())
    plain_fs.hooks["symlink"] = Filesystem.lose_reply(errno.EIO)
    plain_fs.hooks["readlink"] = Filesystem.refuse(errno.EIO, times=2)
    assert files.put_if_absent("log/1", "mine") is True


def test_a_create_that_failed_is_made_again(plain_fs: Filesystem, tmp_path: Path) -> None:
    files = FileStore(tmp_path / "store", clock=FakeClock())
    plain_fs.hooks["symlink"] = Filesystem.refuse(errno.EIO, times=3)
    assert files.put_if_absent("log/1", "mine") is True
    assert files.get("log/1") == "mine"


def test_a_create_that_always_fails_is_a_passing_fault_for_the_caller(plain_fs: Filesystem, tmp_path: Path) -> None:
    files = FileStore(tmp_path / "store", clock=FakeClock())
    plain_fs.hooks["symlink"] = Filesystem.refuse(errno.EIO)
    with pytest.raises(OSError, match="Input/output") as caught:
        files.put_if_absent("log/1", "mine")
    assert not isinstance(caught.value, StoreError)
    assert files.get("log/1") is None


@pytest.mark.parametrize("number", [errno.EPERM, errno.EEXIST, errno.EIO], ids=errno.errorcode.get)
def test_a_loser_is_told_so_by_any_errno(plain_fs: Filesystem, tmp_path: Path, number: int) -> None:
    """sshfs gives EPERM where the others give EEXIST."""
    files = FileStore(tmp_path / "store", clock=FakeClock())

    def hook(real: Hook, target: Any, path: Any) -> None:
        if os.path.lexists(path):
            raise OSError(number, os.strerror(number))
        real(target, path)

    plain_fs.hooks["symlink"] = hook
    assert files.put_if_absent("log/1", "mine") is True
    assert files.put_if_absent("log/1", "yours") is False
    assert files.put_if_absent("log/2", "after") is True
    assert stat.S_ISLNK(os.lstat(tmp_path / "store/log/2").st_mode), "a lost race is no lack of symlinks"


@pytest.mark.parametrize(
    "refusal", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EINVAL], ids=errno.errorcode.get
)
def test_a_filesystem_that_has_no_links_is_found_out_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refusal: int
) -> None:
    fs = Filesystem(symlinks=False, hard_links=False, refusal=refusal)
    monkeypatch.setattr(file_store, "os", fs)
    files = FileStore(tmp_path / "store", clock=FakeClock())
    assert files.put_if_absent("log/1", "mine")
    asked = fs.calls.count("symlink"), fs.calls.count("link")
    assert not files.put_if_absent("log/1", "yours")
    assert files.put_if_absent("log/2", "mine")
    assert (fs.calls.count("symlink"), fs.calls.count("link")) == asked, "not asked again"
    assert sorted(os.listdir(tmp_path / "store/log")) == ["1", "2"]


def test_one_refusal_without_a_reason_does_not_tell_what_a_filesystem_has(plain_fs: Filesystem, tmp_path: Path) -> None:
    """sshfs says EPERM to everything, to a full disk too."""
    files = FileStore(tmp_path / "store", clock=FakeClock())
    files.put_if_absent("log/1", "v")
    for name in ("symlink", "link", "write"):
        plain_fs.hooks[name] = Filesystem.refuse(errno.EPERM)
    with pytest.raises(PermissionError):
        files.put_if_absent("log/2", "v")
    plain_fs.hooks.clear()
    assert files.put_if_absent("log/3", "v")
    assert stat.S_ISLNK(os.lstat(tmp_path / "store/log/3").st_mode)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EIO], ids=errno.errorcode.get)
def test_a_full_disk_that_gives_no_reason_is_found_out(plain_fs: Filesystem, tmp_path: Path, number: int) -> None:
    """As on sshfs."""
    files = FileStore(tmp_path / "store", clock=FakeClock())
    files.put_if_absent("log/1", "v")
    for name in ("symlink", "link", "write"):
        plain_fs.hooks[name] = Filesystem.refuse(number)
    with pytest.raises(OSError):
        files.put_if_absent("log/2", "v")
    room = os.statvfs(tmp_path)
    full = os.statvfs_result([*room[:4], 0, *room[5:]])
    plain_fs.hooks["statvfs"] = lambda real, *args: full
    with pytest.raises(StoreFullError, match=r"can't create log/2: No space left"):
        files.put_if_absent("log/2", "v")
    assert os.listdir(tmp_path / "store/log") == ["1"]


@pytest.mark.parametrize("value", ["../x", "a/../b", "see ../train.py", "a..b", "nothing\0at all"])
def test_what_no_symlink_can_hold_everywhere_is_a_file(tmp_path: Path, value: str) -> None:
    """sshfs refuses to read a symlink with ".." in it."""
    files = FileStore(tmp_path / "store", clock=FakeClock())
    assert files.put_if_absent("log/1", value)
    assert files.get("log/1") == value
    assert stat.S_ISREG(os.lstat(tmp_path / "store/log/1").st_mode)


def test_a_loser_reads_the_winners_value_however_late_it_shows(plain_fs: Filesystem, tmp_path: Path) -> None:
    """A negative entry in the cache: listed, and yet ENOENT (GlusterFS and MooseFS, up to a second)."""
    files = FileStore(tmp_path / "store", clock=FakeClock())
    files.put_if_absent("log/1", "theirs")
    plain_fs.hooks["readlink"] = Filesystem.refuse(errno.ENOENT, times=8)
    assert files.put_if_absent("log/1", "mine") is False
    plain_fs.hooks["readlink"] = Filesystem.refuse(errno.ENOENT, times=8)
    assert files.put_if_absent("log/1", "theirs") is True


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE], ids=errno.errorcode.get)
def test_what_is_gone_or_stale_is_not_there_yet(fs: Filesystem, files: FileStore, number: int) -> None:
    files.put_if_absent("log/1", "v")
    files.overwrite("hb/a", "1")

    def gone_below(real: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        if os.fsdecode(path).startswith(files.root):
            raise OSError(number, os.strerror(number))
        return real(path, *args, **kwargs)

    for name in ("readlink", "open", "listdir", "unlink"):
        fs.hooks[name] = gone_below
    assert files.get("log/1") is None
    assert files.version("hb/a") is None
    assert files.list("log") == []
    files.delete("log/1")


def test_a_mount_that_is_stale_as_a_whole_refuses(fs: Filesystem, files: FileStore) -> None:
    """And nothing is taken for absent: an export that was withdrawn comes back."""
    files.put_if_absent("log/1", "v")
    for name in ("readlink", "open", "listdir"):
        fs.hooks[name] = Filesystem.refuse(errno.ESTALE)
    for call in (lambda: files.get("log/1"), lambda: files.list("log"), lambda: files.version("hb/a")):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.ESTALE
    fs.hooks.clear()
    assert files.get("log/1") == "v"


def test_a_create_that_is_refused_as_all_else_is_told_soon(fs: Filesystem, tmp_path: Path) -> None:
    clock = FakeClock()
    files = FileStore(tmp_path / "store", clock=clock)
    for name in ("readlink", "open", "listdir", "symlink", "link"):
        fs.hooks[name] = Filesystem.refuse(errno.EACCES)
    began = clock.now
    with pytest.raises(PermissionError):
        files.put_if_absent("log/1", "v")
    assert clock.now - began < 2.0, "whoever waits to say something must know that it can't"
    fs.hooks.clear()
    assert files.put_if_absent("log/1", "v")


def test_a_stale_handle_in_mid_read_is_not_there_yet(fs: Filesystem, files: FileStore) -> None:
    files.overwrite("hb/a", "1")
    fs.hooks["read"] = Filesystem.refuse(errno.ESTALE)
    assert files.get("hb/a") is None


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ETIMEDOUT], ids=errno.errorcode.get)
def test_a_passing_fault_is_told(fs: Filesystem, files: FileStore, number: int) -> None:
    """And not taken for absence: absence is evidence."""
    files.put_if_absent("log/1", "v")
    for name in ("readlink", "open", "listdir", "unlink"):
        fs.hooks[name] = Filesystem.refuse(number)
    for call in (lambda: files.get("log/1"), lambda: files.list("log"), lambda: files.delete("log/1")):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == number


def test_a_torn_file_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "os", filesystem("exclusive creation"))
    clock = FakeClock()
    files = FileStore(tmp_path / "store", clock=clock)
    files.put_if_absent("log/1", "a value of some length")
    path = tmp_path / "store/log/1"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert files.get("log/1") is None
    began = clock.now
    path.write_bytes(whole[:10])

    def finish(stop: threading.Event, seconds: float) -> bool:
        clock.now += seconds
        if clock.now - began > 0.5:
            path.write_bytes(whole)  # its writer was only slow
        return False

    monkeypatch.setattr(clock, "wait", finish)
    assert files.put_if_absent("log/1", "another") is False
    assert files.get("log/1") == "a value of some length"


def test_garbage_is_not_there_yet(files: FileStore) -> None:
    files.put_if_absent("log/1", "v")
    folder = Path(files.root) / "log"
    for name, raw in (("2", b""), ("3", b"\xff\xfe\x00"), ("4", b"00000000 wrong"), ("5", b"nochecksum")):
        (folder / name).write_bytes(raw)
        assert files.get(f"log/{name}") is None
    (folder / "6").symlink_to("deadbeef wrong")
    assert files.get("log/6") is None


def test_a_create_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = filesystem("exclusive creation")
    monkeypatch.setattr(file_store, "os", fs)
    files = FileStore(tmp_path / "store", clock=FakeClock())
    fs.hooks["fsync"] = Filesystem.refuse(errno.EIO, times=1)
    assert files.put_if_absent("log/1", "mine") is True
    assert files.get("log/1") == "mine"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS], ids=errno.errorcode.get)
def test_no_room_is_told_at_once_and_leaves_nothing(fs: Filesystem, files: FileStore, number: int) -> None:
    files.put_if_absent("log/1", "v")
    fs.hooks.setdefault("symlink", Filesystem.refuse(number))
    fs.hooks["write"] = Filesystem.refuse(number)
    with pytest.raises(StoreError, match=r"can't create log/2: ") as caught:
        files.put_if_absent("log/2", "v" * 100)
    assert os.strerror(number) in str(caught.value)
    assert isinstance(caught.value, StoreFullError) == (number != errno.EROFS)
    assert os.listdir(Path(files.root) / "log") == ["1"]


def test_a_cell_on_a_full_disk_still_shows_that_its_owner_lives(fs: Filesystem, files: FileStore) -> None:
    """On a filesystem that never writes in place (btrfs, ZFS) a full disk refuses this too; a time it can set."""
    files.overwrite("hb/a", "1 abcd")
    os.utime(Path(files.root) / "hb/a", ns=(0, 0))
    before = files.version("hb/a")
    fs.hooks["pwrite"] = Filesystem.refuse(errno.ENOSPC)
    files.overwrite("hb/a", "2 abcd")
    assert files.get("hb/a") == "1 abcd"
    assert files.version("hb/a") != before


def test_a_cell_that_can_not_be_written_is_told(fs: Filesystem, files: FileStore) -> None:
    fs.hooks["pwrite"] = Filesystem.refuse(errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        files.overwrite("hb/a", "1")


def test_a_folder_that_was_removed_meanwhile_is_made_again(files: FileStore) -> None:
    files.put_if_absent("round/000001/join+a", "in")
    os.unlink(Path(files.root) / "round/000001/join+a")
    os.rmdir(Path(files.root) / "round/000001")
    assert files.put_if_absent("round/000001/join+a", "in") is True


def test_names_with_a_dot_first_are_nobodys(files: FileStore) -> None:
    files.put_if_absent("log/1", "v" * 2000)  # by a temporary file, also where there are symlinks
    folder = Path(files.root) / "log"
    (folder / ".nfs000000000001").touch()  # what NFS makes of a file that was removed while open
    (folder / ".0123456789abcdef").touch()
    assert files.list("log") == ["1"]


def test_invalidating_changes_the_folders_time_and_leaves_nothing(fs: Filesystem, tmp_path: Path) -> None:
    files = FileStore(tmp_path / "store", clock=FakeClock())
    files.put_if_absent("log/1", "v")
    folder = tmp_path / "store/log"
    os.utime(folder, ns=(0, 0))
    files.invalidate("log")
    assert os.stat(folder).st_mtime_ns > 0
    assert os.listdir(folder) == ["1"]
    for hook in (Filesystem.refuse(errno.EIO), Filesystem.lose_reply(errno.EIO)):
        fs.hooks["symlink"] = hook
        files.invalidate("log")  # it only makes a cache fresher
        assert os.listdir(folder) == ["1"]
    files.invalidate("nosuch/folder")
    assert os.listdir(tmp_path / "store") == ["log"]


def test_text_is_utf8_on_disk_whatever_the_locale(tmp_path: Path) -> None:
    """Two nodes may have different ones."""
    code = (
        "import sys; from pathlib import Path; from hpc_elastic.base.clock import SystemClock\n"
        "from hpc_elastic.store.file_store import FileStore\n"
        "store = FileStore(Path(sys.argv[1]), clock=SystemClock())\n"
        "assert store.get('kv/a') == 'gr\\u00fc\\u00dfe', ascii(store.get('kv/a'))\n"
        "assert store.put_if_absent('kv/b', '\\u6771\\u4eac')\n"
    )
    files = FileStore(tmp_path / "store", clock=SystemClock())
    files.put_if_absent("kv/a", "grüße")
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], env=ascii_only, check=True)
    assert files.get("kv/b") == "東京"


# -- who may do what


@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_everything_is_ours_alone_whatever_the_umask(fs: Filesystem, tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        files = FileStore(tmp_path / "store", clock=FakeClock())
        files.put_if_absent("round/000001/ack+a", "v" * 2000)
        files.overwrite("hb/a", "1")
    finally:
        os.umask(before)
    for path in (tmp_path / "store", *(tmp_path / "store").rglob("*")):
        mode = os.lstat(path).st_mode
        assert stat.S_IMODE(mode) == (0o700 if stat.S_ISDIR(mode) else 0o600), path


def test_a_link_in_place_of_the_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "store").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePathError, match="symbolic link"):
        FileStore(tmp_path / "store", clock=FakeClock())
    assert os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o750, 0o755])
def test_a_store_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(mode)
    with pytest.raises(UnsafePathError, match="open to other users"):
        FileStore(tmp_path / "store", clock=FakeClock())


@as_root
def test_another_users_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o700)
    os.chown(tmp_path / "store", 65534, 65534)
    with pytest.raises(UnsafePathError, match="belongs to uid 65534"):
        FileStore(tmp_path / "store", clock=FakeClock())


@as_root
def test_another_users_file_is_refused(tmp_path: Path) -> None:
    files = FileStore(tmp_path / "store", clock=FakeClock())
    files.overwrite("hb/a", "1")
    os.chown(tmp_path / "store/hb/a", 65534, 65534)
    with pytest.raises(StoreError, match="is not a file of ours"):
        files.get("hb/a")


def test_a_fifo_in_place_of_a_value_holds_nobody_up(files: FileStore) -> None:
    files.put_if_absent("log/1", "v")
    os.mkfifo(Path(files.root) / "log/2")
    with pytest.raises(StoreError, match="is not a file of ours"):
        files.get("log/2")


@as_root
def test_a_store_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    files = FileStore(tmp_path / "store", clock=FakeClock())
    files.check()
    os.rename(tmp_path / "store", tmp_path / "aside")
    with pytest.raises(FileNotFoundError):
        files.check()
    (tmp_path / "store").mkdir(mode=0o700)
    os.chown(tmp_path / "store", 65534, 65534)
    with pytest.raises(UnsafePathError):
        files.check()

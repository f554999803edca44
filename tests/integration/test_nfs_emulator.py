"""What the NFS emulator models: the behaviour that the store's other tests rely on."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rigs.nfs_emulator import MountSettings, NfsEmulator
from tests.rigs.nfs_emulator import emulator as emulator_module
from tests.rigs.nfs_emulator.emulator import ROOT
from tests.rigs.waiting import until

LONG = 600.0
"""Seconds of a cache that does not expire within a test."""
SOON = 0.4
"""Seconds of one that does."""
NUMBERS = itertools.count()


def errno_of(call: Callable[[], object]) -> str:
    """The name of the error that `call` fails with; empty where it works."""
    try:
        call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NfsEmulator]:
    with NfsEmulator(tmp_path_factory.mktemp("server")) as emulator:
        yield emulator


class Clients:
    """Two mounts, and the folder of this test as each of them and the server see it."""

    def __init__(self, emulator: NfsEmulator, name: str) -> None:
        self.emulator = emulator
        self.server = emulator.backing / name
        self.server.mkdir()
        self.a, self.b = (path / name for path in emulator.paths)


@pytest.fixture
def clients(shared: NfsEmulator) -> Clients:
    shared.thaw()
    shared.heal()
    shared.change(**{name: getattr(MountSettings(), name) for name in MountSettings.__slots__})
    shared.change(attributes=LONG, directories=LONG)
    found = Clients(shared, f"test-{next(NUMBERS)}")
    shared.drop_caches()
    shared.reset_counters()
    return found


# -- names and listings


def test_a_listing_is_stale_within_its_time_and_fresh_once_the_folder_is_opened(clients: Clients) -> None:
    (clients.a / "old").touch()
    folder = os.open(clients.b, os.O_RDONLY)
    try:
        assert os.listdir(folder) == ["old"]
        (clients.a / "new").touch()
        assert os.listdir(folder) == ["old"], "from the cache"
        assert sorted(os.listdir(clients.b)) == ["new", "old"], "opening asked the server"
    finally:
        os.close(folder)


def test_a_missing_name_stays_missing_until_its_folder_is_asked_for_again(clients: Clients) -> None:
    assert not (clients.b / "new").exists()
    (clients.a / "new").write_text("x")
    assert not (clients.b / "new").exists(), "the cached answer"
    assert errno_of((clients.b / "new").read_text) == "ENOENT", "opening a name that is not there asks nobody"
    os.listdir(clients.b)
    assert (clients.b / "new").read_text() == "x"


def test_a_missing_name_shows_when_the_folders_time_is_over(clients: Clients) -> None:
    clients.emulator.change(directories=SOON)
    assert not (clients.b / "new").exists()
    (clients.a / "new").touch()
    until((clients.b / "new").exists)


def test_a_removed_name_stays_within_its_time(clients: Clients) -> None:
    (clients.a / "old").touch()
    assert (clients.b / "old").exists()
    (clients.a / "old").unlink()
    assert (clients.b / "old").exists()
    assert not (clients.a / "old").exists(), "who removed it knows"
    os.listdir(clients.b)
    assert not (clients.b / "old").exists()


def test_a_change_within_one_tick_of_the_servers_clock_is_missed_until_the_next(clients: Clients) -> None:
    clients.emulator.change(granularity=1.0)
    seen = 0

    def missed() -> bool:
        nonlocal seen
        seen += 1
        os.listdir(clients.b)
        (clients.a / str(seen)).touch()
        return len(os.listdir(clients.b)) < seen

    until(missed)
    time.sleep(1.1 - time.time() % 1)  # the tick is over: that is what this test is about
    assert len(os.listdir(clients.b)) < seen, "nothing has changed since, as far as its time says"
    (clients.a / "next").touch()
    assert len(os.listdir(clients.b)) == seen + 1


def test_what_a_user_makes_is_that_users_from_the_first_moment_on(clients: Clients) -> None:
    clients.emulator.backing.chmod(0o755)
    clients.server.chmod(0o777)
    clients.emulator.drop_caches()
    maker = os.fork()
    if maker == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os.umask(0o077)
            for number in range(200):
                os.mkdir(clients.a / f"d{number}")
                os.symlink("x", clients.a / f"l{number}")
                os.close(os.open(clients.a / f"f{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            os._exit(0)
        finally:
            os._exit(1)
    owners: set[tuple[int, int]] = set()
    while os.waitpid(maker, os.WNOHANG) == (0, 0):
        infos = [entry.stat(follow_symlinks=False) for entry in os.scandir(clients.server)]
        owners |= {(info.st_uid, info.st_gid) for info in infos}
    assert len(os.listdir(clients.b)) == 600
    assert owners == {(65534, 65534)}


def test_ones_own_changes_show_at_once(clients: Clients) -> None:
    clients.emulator.change(granularity=3600.0)
    for number in range(1, 20):
        assert not (clients.a / str(number)).exists()
        (clients.a / str(number)).touch()
        assert len(os.listdir(clients.a)) == number


def test_caches_by_time_alone_hold_whatever_is_opened(clients: Clients) -> None:
    """As sshfs and other FUSE clients do."""
    clients.emulator.change(revalidation="time")
    assert os.listdir(clients.b) == []
    assert not (clients.b / "new").exists()
    (clients.a / "new").touch()
    assert os.listdir(clients.b) == []
    assert not (clients.b / "new").exists()
    clients.emulator.change(directories=SOON)
    until(lambda: os.listdir(clients.b) == ["new"])
    until((clients.b / "new").exists)


# -- exclusive creation


@pytest.mark.parametrize("kind", ["open", "symlink", "link", "mkdir"])
def test_exactly_one_mount_creates_a_name(clients: Clients, kind: str) -> None:
    (clients.a / "source").touch()
    os.listdir(clients.b)
    create: dict[str, Callable[[Path], object]] = {
        "open": lambda path: os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)),
        "symlink": lambda path: os.symlink("text", path),
        "link": lambda path: os.link(path.with_name("source"), path),
        "mkdir": lambda path: os.mkdir(path),
    }
    rounds = 30
    barrier = threading.Barrier(4)
    results: list[list[str]] = [[] for _ in range(4)]

    def race(me: int) -> None:
        for number in range(rounds):
            path = (clients.a, clients.b)[me % 2] / f"{kind}-{number}"
            path.exists()  # remembered as missing: that must not decide
            barrier.wait(30)
            results[me].append(errno_of(lambda path=path: create[kind](path)))

    racers = [threading.Thread(target=race, args=(me,), daemon=True) for me in range(4)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    for number in range(rounds):
        assert sorted(result[number] for result in results) == ["", "EEXIST", "EEXIST", "EEXIST"]


# -- contents


def test_a_rewrite_in_place_is_seen_by_the_open_that_follows_the_close(clients: Clients) -> None:
    (clients.a / "cell").write_text("1")
    reader = os.open(clients.b / "cell", os.O_RDONLY)
    writer = os.open(clients.a / "cell", os.O_WRONLY)
    try:
        assert os.pread(reader, 9, 0) == b"1"
        os.pwrite(writer, b"2", 0)
        assert (clients.b / "cell").read_text() == "1", "not written back yet"
        os.fsync(writer)
        assert os.pread(reader, 9, 0) == b"1", "what is open is stale within its time"
        assert (clients.b / "cell").read_text() == "2"
        os.pwrite(writer, b"3", 0)
    finally:
        os.close(writer)
    assert (clients.b / "cell").read_text() == "3"
    os.close(reader)


def test_what_is_open_is_fresh_when_its_time_is_over(clients: Clients) -> None:
    clients.emulator.change(attributes=SOON)
    (clients.a / "cell").write_text("1")
    with open(clients.b / "cell", "rb", buffering=0) as reader:
        assert os.pread(reader.fileno(), 9, 0) == b"1"
        (clients.a / "cell").write_text("2")
        until(lambda: os.pread(reader.fileno(), 9, 0) == b"2")


def test_writes_can_go_to_the_server_at_once(clients: Clients) -> None:
    clients.emulator.change(write_behind=False)
    with open(clients.a / "cell", "wb", buffering=0) as writer:
        writer.write(b"now")
        assert (clients.b / "cell").read_bytes() == b"now"


def test_what_is_not_closed_is_written_back_after_a_while(clients: Clients) -> None:
    with open(clients.a / "log", "wb", buffering=0) as writer:
        writer.write(b"late")
        assert (clients.b / "log").read_bytes() == b""
        clients.emulator.change(written_back=0.2)
        until(lambda: (clients.b / "log").read_bytes() == b"late")


def test_large_files_come_back_as_they_were(clients: Clients) -> None:
    data = os.urandom(1 << 20) * 10
    (clients.a / "large").write_bytes(data)
    assert (clients.b / "large").read_bytes() == data
    assert (clients.server / "large").read_bytes() == data


# -- stale handles


def test_an_open_file_that_another_client_removed_is_stale(clients: Clients) -> None:
    clients.emulator.change(attributes=SOON)
    (clients.a / "file").write_text("old")
    with open(clients.b / "file", "rb", buffering=0) as reader:
        assert os.pread(reader.fileno(), 9, 0) == b"old"
        (clients.a / "file").unlink()
        until(lambda: errno_of(lambda: os.pread(reader.fileno(), 9, 0)) == "ESTALE")


def test_a_file_that_was_replaced_is_opened_anew(clients: Clients) -> None:
    (clients.a / "file").write_text("old")
    assert (clients.b / "file").read_text() == "old"
    (clients.a / "temporary").write_text("new")
    os.replace(clients.a / "temporary", clients.a / "file")
    assert (clients.b / "file").read_text() == "new"


def test_a_file_removed_while_its_own_client_has_it_open_is_renamed(clients: Clients) -> None:
    (clients.a / "file").write_text("old")
    with open(clients.a / "file") as reader:
        (clients.a / "file").unlink()
        assert [name[:4] for name in os.listdir(clients.b)] == [".nfs"]
        assert reader.read() == "old"
    until(lambda: os.listdir(clients.server) == [])


# -- what goes wrong


def test_a_lost_reply_is_an_error_for_work_that_was_done(clients: Clients) -> None:
    clients.emulator.fail("EIO", "symlink", mount=0, done=True, times=1)
    assert errno_of(lambda: os.symlink("text", clients.a / "link")) == "EIO"
    assert os.readlink(clients.server / "link") == "text"
    assert errno_of(lambda: os.symlink("text", clients.a / "link")) == "EEXIST", "once only"


@pytest.mark.parametrize("write_behind", [True, False], ids=["at close", "at write"])
def test_a_full_disk(clients: Clients, write_behind: bool) -> None:
    clients.emulator.change(write_behind=write_behind)
    clients.emulator.fail("ENOSPC", "write")
    fd = os.open(clients.a / "file", os.O_CREAT | os.O_WRONLY)
    assert errno_of(lambda: os.write(fd, b"text")) == ("" if write_behind else "ENOSPC")
    assert errno_of(lambda: os.close(fd)) == ("ENOSPC" if write_behind else "")
    clients.emulator.heal()
    assert (clients.b / "file").read_bytes() == b""


@pytest.mark.parametrize("error", ["EIO", "ENOSYS", "EACCES", "ESTALE", "ETIMEDOUT"])
def test_errors_on_demand(clients: Clients, error: str) -> None:
    clients.emulator.fail(error, "mkdir", mount=0, name="want")
    assert errno_of((clients.a / "wanted").mkdir) == error
    assert errno_of((clients.a / "different").mkdir) == "", "by name"
    assert errno_of((clients.b / "wanted").mkdir) == "", "on one mount"
    clients.emulator.heal()
    assert errno_of((clients.a / "wanted2").mkdir) == ""


def test_a_frozen_server_holds_everything_up_until_it_thaws(clients: Clients) -> None:
    clients.emulator.freeze(mount=0)
    made = threading.Thread(target=(clients.a / "made").mkdir, daemon=True)
    made.start()
    made.join(0.3)
    assert made.is_alive()
    assert os.listdir(clients.b) == [], "the other mount goes on"
    clients.emulator.thaw()
    made.join(10)
    assert not made.is_alive()
    assert os.listdir(clients.b) == ["made"]


def test_the_servers_clock_may_be_off(clients: Clients) -> None:
    clients.emulator.change(clock_offset=-3600.0)
    (clients.a / "file").touch()
    assert -3610 < os.stat(clients.b / "file").st_mtime - time.time() < -3590
    os.utime(clients.a / "file", (0, 5000))
    assert os.stat(clients.a / "file").st_mtime == 5000
    os.utime(clients.a / "file")
    assert -3610 < os.stat(clients.a / "file").st_mtime - time.time() < -3590


# -- locks


def test_a_lock_of_one_mount_keeps_the_other_out(clients: Clients) -> None:
    (clients.a / "file").touch()
    with open(clients.a / "file", "r+") as mine, open(clients.b / "file", "r+") as yours:
        assert errno_of(lambda: fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)) == ""
        assert errno_of(lambda: fcntl.flock(yours, fcntl.LOCK_EX | fcntl.LOCK_NB)) == "EAGAIN"


# -- figures


def test_operations_on_the_server_are_counted_by_kind(clients: Clients) -> None:
    os.symlink("text", clients.a / "link")
    assert clients.emulator.counters()["symlink"] == 1
    assert clients.emulator.counters(mount=1)["symlink"] == 0
    os.listdir(clients.b)
    clients.emulator.reset_counters()
    for _ in range(10):
        os.listdir(clients.b)
    assert dict(clients.emulator.counters()) == {"getattr": 10}, "an unchanged listing costs one question"
    clients.emulator.reset_counters()
    assert os.readlink(clients.b / "link") == os.readlink(clients.b / "link") == "text"
    assert dict(clients.emulator.counters()) == {"lookup": 1, "readlink": 1}


# -- where there is no FUSE


@pytest.mark.parametrize(("ci", "told"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_without_fuse_tests_are_skipped_and_fail_in_ci(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ci: str, told: type[BaseException]
) -> None:
    monkeypatch.setattr(emulator_module, "unavailable", lambda: "this machine has no FUSE (/dev/fuse)")
    monkeypatch.setenv("CI", ci)
    with pytest.raises(told, match="the NFS emulator can't run: this machine has no FUSE"):
        NfsEmulator(tmp_path).__enter__()


# -- clean-up


def mounted() -> list[str]:
    with open("/proc/self/mounts") as mounts:
        return [line.split(" ")[1] for line in mounts if " fuse.nfs_emulator " in line]


def test_nothing_is_left_of_a_mount_that_was_killed_or_frozen(tmp_path: Path) -> None:
    with NfsEmulator(tmp_path, mounts=3) as emulator:
        ours = [str(path) for path in emulator.paths]
        assert set(ours) <= set(mounted())
        os.kill(emulator.pid(0), signal.SIGKILL)
        until(lambda: errno_of(lambda: os.listdir(ours[0])) == "ENOTCONN")
        emulator.freeze(mount=1)
        threading.Thread(target=lambda: errno_of(lambda: os.mkdir(ours[1] + "/made")), daemon=True).start()
        os.kill(emulator.pid(2), signal.SIGSTOP)
    assert not set(ours) & set(mounted())
    assert not emulator.paths[0].parent.exists()


def test_mounts_end_with_whoever_started_them(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tests.rigs.nfs_emulator import NfsEmulator\n"
        "emulator = NfsEmulator(Path(sys.argv[1]), mounts=1).__enter__()\n"
        "print(emulator.paths[0], flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        path = user.stdout.readline().decode().strip()
        assert path in mounted()
        user.kill()
    until(lambda: path not in mounted())
    until(lambda: not Path(path).parent.exists())


def test_one_client_can_be_mounted_by_command(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    argv = [sys.executable, "-m", "tests.rigs.nfs_emulator", str(tmp_path / "server"), str(tmp_path / "client")]
    with subprocess.Popen([*argv, "--settings", '{"attributes": 60}'], cwd=ROOT) as client:
        until(lambda: str(tmp_path / "client") in mounted(), seconds=60)
        (tmp_path / "client/file").write_text("text")
        assert (tmp_path / "server/file").read_text() == "text"
        client.terminate()
        assert client.wait(10) == 0
    assert str(tmp_path / "client") not in mounted()

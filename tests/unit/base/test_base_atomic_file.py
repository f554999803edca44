"""Private folders and whole files: modes whatever the umask, links and strangers refused, nothing half written."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_elastic.base import files
from hpc_elastic.base.files import (
    Owner,
    check_private_dir,
    make_private_dir,
    open_checked,
    read_bytes,
    read_json,
    why_replaceable,
    write_json,
    write_private,
)
from hpc_elastic.errors import UnsafePathError

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")
UMASKS = [0o000, 0o022, 0o777]


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


# Folders


@pytest.mark.parametrize("mask", UMASKS)
def test_a_new_folder_is_ours_alone_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        make_private_dir(tmp_path / "run")
    assert mode(tmp_path / "run") == 0o700


def test_a_folder_of_ours_may_be_there_already_unless_it_must_be_new(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        check_private_dir(tmp_path / "run")
    make_private_dir(tmp_path / "run")
    (tmp_path / "run" / "kept").touch()
    make_private_dir(tmp_path / "run")
    assert (tmp_path / "run" / "kept").exists()
    with pytest.raises(FileExistsError):
        make_private_dir(tmp_path / "run", exist_ok=False)


@pytest.mark.parametrize(
    ("target", "why"),
    [("elsewhere", "is a symbolic link"), ("nothing", "is a symbolic link"), (None, "is not a folder")],
)
def test_a_link_or_a_file_in_place_of_the_folder_is_refused(tmp_path: Path, target: str | None, why: str) -> None:
    make_private_dir(tmp_path / "elsewhere")
    if target is None:
        (tmp_path / "run").touch()
    else:
        (tmp_path / "run").symlink_to(tmp_path / target)
    with pytest.raises(UnsafePathError, match=why):
        make_private_dir(tmp_path / "run")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("wide", [0o750, 0o701, 0o770, 0o1777])
def test_a_folder_that_others_can_enter_is_refused_with_the_way_out(tmp_path: Path, wide: int) -> None:
    (tmp_path / "run").mkdir()
    os.chmod(tmp_path / "run", wide)
    with pytest.raises(UnsafePathError, match=f"chmod 700 {tmp_path / 'run'}"):
        make_private_dir(tmp_path / "run")


@as_root
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    make_private_dir(tmp_path / "run")
    os.chown(tmp_path / "run", 65534, 65534)
    with pytest.raises(UnsafePathError, match="belongs to uid 65534"):
        make_private_dir(tmp_path / "run")


# Writing


@pytest.mark.parametrize("mask", UMASKS)
@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_ours_alone_whatever_the_umask(tmp_path: Path, mask: int, durable: bool) -> None:
    with umask(mask):
        write_private(tmp_path / "secret", b"x", durable=durable)
    assert mode(tmp_path / "secret") == 0o600
    assert (tmp_path / "secret").read_bytes() == b"x"


def test_writing_replaces_the_file_and_leaves_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ("n" * 255)  # as long as the filesystem allows
    path.write_text("a longer text than the next")
    os.chmod(path, 0o644)
    real_write = os.write
    with monkeypatch.context() as patched:  # short writes are continued
        patched.setattr(files.os, "write", lambda fd, data: real_write(fd, bytes(data[:3])))
        write_private(path, "näxt one")
    assert path.read_text(encoding="utf-8") == "näxt one"
    assert mode(path) == 0o600
    assert os.listdir(tmp_path) == [path.name]
    (tmp_path / "link").symlink_to(path)
    write_private(tmp_path / "link", "new")
    assert path.read_text(encoding="utf-8") == "näxt one", "a link is replaced, not followed"
    assert not (tmp_path / "link").is_symlink()
    with pytest.raises(FileNotFoundError):
        write_private(tmp_path / "gone" / "a", "x")


def test_a_full_disk_keeps_the_old_file_and_leaves_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("old")
    real_write = os.write

    def half_then_full(fd: int, data: bytes) -> int:
        if len(data) > 4:
            return real_write(fd, bytes(data[:4]))
        with open("/dev/full", "wb", buffering=0) as full:
            return full.write(data) or 0

    monkeypatch.setattr(files.os, "write", half_then_full)
    with pytest.raises(OSError) as caught:
        write_private(tmp_path / "a", "12345678")
    assert caught.value.errno == errno.ENOSPC
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_an_interrupt_while_replacing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("old")

    def interrupted(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_private(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


# Reading


def test_reading_stops_at_the_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 5_000_000)
    assert len(read_bytes(tmp_path / "a", limit=3_000_000)) == 3_000_000
    assert len(read_bytes(tmp_path / "a", limit=9_000_000)) == 5_000_000


def test_reading_follows_no_link_and_waits_for_no_fifo(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UnsafePathError, match="symbolic link"):
        read_bytes(tmp_path / "link", limit=10)
    with pytest.raises(UnsafePathError, match="not a regular file"):
        read_bytes(tmp_path / "fifo", limit=10)
    assert str(read_json(tmp_path / "link")).startswith("unreadable: ")
    assert str(read_json(tmp_path / "fifo")).startswith("unreadable: ")


@as_root
def test_a_stranger_s_file_is_refused_but_root_s_and_ours_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, uid in (("ours", 1234), ("root", 0), ("stranger", 4321)):
        (tmp_path / name).write_text("{}")
        os.chown(tmp_path / name, uid, uid)
    monkeypatch.setattr(files.os, "geteuid", lambda: 1234)
    assert read_json(tmp_path / "ours") == {}
    assert read_json(tmp_path / "root") == {}
    with pytest.raises(UnsafePathError, match="belongs to uid 4321"):
        read_bytes(tmp_path / "stranger", limit=10)
    assert "belongs to uid 4321" in str(read_json(tmp_path / "stranger"))


@pytest.mark.parametrize(
    ("raw", "limit", "said"),
    [
        (b"", 10**6, "unreadable: "),
        (b'{"version": 1, "na', 10**6, "unreadable: "),
        (b"\x00\xff\xfe", 10**6, "unreadable: "),
        (b"[1, 2]", 10**6, "unreadable: holds a list, not an object"),
        (b"null", 10**6, "unreadable: holds a NoneType, not an object"),
        (b"[" * 200_000, 10**6, "unreadable: "),
        (b'{"key": "%s"}' % (b"x" * 100), 50, "unreadable: cut off"),
        (None, 10**6, "missing"),
    ],
)
def test_what_holds_no_object_is_a_sentence_and_not_an_exception(
    tmp_path: Path, raw: bytes | None, limit: int, said: str
) -> None:
    if raw is not None:
        (tmp_path / "a").write_bytes(raw)
    value = read_json(tmp_path / "a", limit=limit)
    assert isinstance(value, str)
    assert value.startswith(said)
    assert read_json(tmp_path / "gone" / "a") == "missing"


@pytest.mark.parametrize("text", ["ünïcode 日本", 'two\nlines "quoted" $HOME `x`', "\udcff not UTF-8 \udc80"])
def test_json_comes_back_as_it_was_written_and_stays_readable_for_people(tmp_path: Path, text: str) -> None:
    write_json(tmp_path / "a", {"text": text, "n": 1, "nothing": None})
    assert read_json(tmp_path / "a") == {"text": text, "n": 1, "nothing": None}
    write_json(tmp_path / "a", {"b": "ü", "a": 1})
    assert (tmp_path / "a").read_text(encoding="utf-8") == '{\n "b": "ü",\n "a": 1\n}\n'


# Folders in which others could put something in our place


def test_a_folder_that_everybody_writes_to_must_be_sticky_and_ours(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert "chmod o-w" in (why_replaceable(tmp_path, option="--x") or "")
    tmp_path.chmod(0o1777)
    assert why_replaceable(tmp_path, option="--x") is None
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, 12345)
        for permissions in (0o700, 0o777, 0o1777):
            tmp_path.chmod(permissions)
            assert "belongs to uid 12345" in (why_replaceable(tmp_path, option="--x") or "")


# Files of ours in folders that others can write to


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_CREAT])
def test_a_link_or_a_fifo_is_not_opened(tmp_path: Path, flags: int) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    for name, why in (("fifo", "regular file"), ("link", "symbolic link"), ("nowhere", "symbolic link")):
        with pytest.raises(UnsafePathError, match=why):
            open_checked(tmp_path / name, flags, owner=Owner.OWN)
    assert not (tmp_path / "missing").exists()


def test_a_second_name_matters_to_writers_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    os.link(tmp_path / "file", tmp_path / "other")
    os.close(open_checked(tmp_path / "other", owner=Owner.OWN))
    with pytest.raises(UnsafePathError, match="second name"):
        open_checked(tmp_path / "other", os.O_WRONLY | os.O_APPEND, owner=Owner.OWN)


@as_root
def test_the_file_of_another_user_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.chown(tmp_path / "file", 12345, 12345)
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT):
        with pytest.raises(UnsafePathError, match="uid 12345"):
            open_checked(tmp_path / "file", flags, owner=Owner.OWN)


def test_programs_started_from_here_do_not_inherit_an_own_file(tmp_path: Path) -> None:
    fd = open_checked(tmp_path / "file", os.O_WRONLY | os.O_CREAT, owner=Owner.OWN)
    assert not os.get_inheritable(fd)
    assert mode(tmp_path / "file") == 0o600
    os.close(fd)

"""The suite of all stores on real network filesystems, where each participant is on another client of the server."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.store.file_store import FileStore, StoreError
from tests.contract.store_suite import ProcessSuite, StoreSuite, Subject
from tests.rigs.network_mounts import KINDS, NetworkMounts, started_together

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def wait_for() -> Iterator[Callable[[str], NetworkMounts]]:
    with started_together() as wait:
        yield wait


@pytest.fixture(scope="module", params=KINDS)
def filesystem(request: pytest.FixtureRequest, wait_for: Callable[[str], NetworkMounts]) -> NetworkMounts:
    return wait_for(request.param)


@pytest.fixture
def subject(filesystem: NetworkMounts) -> Subject:
    mounts = itertools.cycle(filesystem.paths)
    name = f"store-{next(NUMBERS)}"
    kind = filesystem.kind
    return Subject(
        open=lambda: FileStore(next(mounts) / name, clock=SystemClock()),
        listing_delay=kind.listing_delay,
        delay=kind.delay,
    )


class TestOnNetworkMounts(StoreSuite, ProcessSuite):
    """GlusterFS, sshfs, MooseFS, CephFS."""


def test_a_value_is_made_by_one_operation(filesystem: NetworkMounts) -> None:
    """All of them have symlinks: neither the hard link nor the exclusive file has to stand in."""
    name = f"store-{next(NUMBERS)}"
    store = FileStore(filesystem.paths[0] / name, clock=SystemClock())
    assert store.put_if_absent("log/1", "v" * 800)
    assert not store.put_if_absent("log/1", "w")
    assert store.put_if_absent("log/2", "w")
    assert [path.is_symlink() for path in sorted((filesystem.paths[1] / name / "log").iterdir())] == [True, True]


def test_a_removed_store_is_noticed_on_the_other_client(filesystem: NetworkMounts) -> None:
    name = f"store-{next(NUMBERS)}"
    here, there = (FileStore(path / name, clock=SystemClock()) for path in filesystem.paths)
    here.put_if_absent("log/1", "v")
    there.check()
    here.delete("log/1")
    os.rmdir(filesystem.paths[0] / name / "log")
    os.rmdir(filesystem.paths[0] / name)

    def is_gone() -> bool:
        try:
            there.check()
        except FileNotFoundError:
            return True
        return False

    Subject(open=lambda: there, delay=max(1.0, filesystem.kind.delay)).shows(is_gone, True)


@pytest.mark.parametrize(
    "filesystem", [name for name, kind in KINDS.items() if kind.disk_megabytes], indirect=True, scope="module"
)
def test_a_full_disk_is_told_and_passes(filesystem: NetworkMounts) -> None:
    name = f"store-{next(NUMBERS)}"
    store, other = (FileStore(path / name, clock=SystemClock()) for path in filesystem.paths)
    store.put_if_absent("log/1", "v")
    store.overwrite("hb/a", "1 abcd")
    filler = filesystem.server_disk / "filler"
    _fill(filler)
    try:
        with pytest.raises(StoreError, match=r"can't create kv/1: No space left|can't create log/2: "):
            for number in range(2, 10_000):
                store.put_if_absent(f"log/{number}", "v" * 5000)
        store.overwrite("hb/a", "2 abcd")  # in place: needs no room
        assert store.get("log/1") == "v"
    finally:
        filler.unlink()

    def has_room() -> bool:
        try:
            store.put_if_absent("after/1", "v")
        except StoreError:
            return False
        return True

    # A GlusterFS server that has seen its disk full looks again every five seconds.
    Subject(open=lambda: store, delay=60.0).shows(has_room, True)
    Subject(open=lambda: other, delay=filesystem.kind.delay or 1.0).shows(lambda: other.get("after/1"), "v")
    Subject(open=lambda: other, delay=filesystem.kind.delay or 1.0).shows(lambda: other.get("hb/a"), "2 abcd")


def _fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(b"0" * size)
            except OSError:
                size //= 2

"""Every participant of a checkpoint dies before each of its writes: what others see is always whole, and the same."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.checkpoints.copying import Replicator
from hpc_elastic.checkpoints.folders import (
    COPY,
    INDEX_NAME,
    START_VARIABLE,
    NodePart,
    NodePlace,
    Start,
    checkpoint_dir,
    committed_steps,
    latest_checkpoint,
    read_index,
    targets_in,
)
from hpc_elastic.checkpoints.node import DEAD_SECONDS, FLUSH_SECONDS, NodeCheckpoints
from hpc_elastic.run.agent_events import CheckpointNotCommitted
from hpc_elastic.run.events import RunEvent
from tests.rigs.fake_clock import FakeClock
from tests.rigs.specs import make_spec

NODES, RANKS = 2, 2
UID = "0123456789abcdef"
_WRITES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.link"}


class Crash(BaseException):
    pass


class Victim:
    """Dies before its write number `at`, counted from 0; nothing that it does afterwards has an effect."""

    def __init__(self, name: str, at: int) -> None:
        self.name, self.left, self.is_dead = name, at, False

    def on_write(self) -> None:
        if not self.is_dead and self.left > 0:
            self.left -= 1
            return
        self.is_dead = True
        raise Crash(self.name)


_watch: Callable[[], None] | None = None


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watch is None:
        return
    is_write = event in _WRITES or (
        event == "open" and isinstance(args[2], int) and bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    )
    if is_write and isinstance(args[0], (str, Path)) and "model-world" in str(args[0]):
        _watch()


sys.addaudithook(_audit)


class World:
    def __init__(
        self,
        root: Path,
        victim: Victim | None,
        *,
        writes: Callable[[int], bool],
        keep: int = 1,
        replicas: bool = False,
        room: int = 1 << 30,
    ) -> None:
        self.root = root / "model-world"
        self.shared = self.root / "shared"
        self.shared.mkdir(parents=True)
        self.victim, self.writes, self.keep, self.replicas, self.room = victim, writes, keep, replicas, room
        self.clock = FakeClock()
        self.replicators: dict[Path, Replicator] = {}
        self.round, self.starts = -1, 0
        self.newest = -1
        self.events: list[RunEvent] = []
        self.nodes = [self.new_node(k) for k in range(NODES)]

    def new_node(self, index: int) -> NodeCheckpoints:
        self.starts += 1
        local = self.root / f"node-{index}-{self.starts}"
        local.mkdir()
        return NodeCheckpoints(
            spec=make_spec(
                run_id="run", uid=UID, checkpoint_dir=str(self.shared), checkpoint_keep=self.keep,
                checkpoint_replicas=int(self.replicas),
            ),
            local=local, reports=self.root / "checkpoints", room=self.room, clock=self.clock, write=self.events.append,
        )  # fmt: skip

    def uid(self, index: int) -> str:
        return f"0-n{index}-{self.nodes[index].local.name}"

    def replicate(self, index: int) -> None:
        """As `send_part` does it, on this machine."""
        node, neighbour = self.nodes[index], self.nodes[(index + 1) % NODES]

        def send(part: NodePart, folder: Path) -> None:
            copy = neighbour.local / part.name(COPY)
            shutil.copytree(folder, copy.with_name(f".incoming-{copy.name}") / folder.name, dirs_exist_ok=True)
            (copy.with_name(f".incoming-{copy.name}") / "owner").write_text(self.uid(index))
            os.rename(copy.with_name(f".incoming-{copy.name}"), copy)

        found = self.replicators.setdefault(node.local, Replicator(node.local, self.shared, UID, send))
        found.tick(index)

    @contextmanager
    def acting(self, name: str) -> Iterator[None]:
        """What is done meanwhile is done by the participant `name`."""
        global _watch
        is_victim = self.victim is not None and self.victim.name == name
        _watch = self.victim.on_write if is_victim and self.victim is not None else None
        try:
            yield
        finally:
            _watch = None
            self.check()

    def check(self) -> None:
        """No folder has a checkpoint's name without its index and all its files, and the newest one stays."""
        for step in committed_steps(self.shared):
            index = read_index(self.shared, step)
            assert index is not None, f"half of step {step} is shown"
            for name, facts in index.files.items():
                assert (self.shared / f"step-{step}" / name).stat().st_size == facts.size
        newest = max(committed_steps(self.shared), default=-1)
        assert newest >= self.newest, "the last complete checkpoint was removed"
        self.newest = newest

    def begin_round(self) -> int:
        """All nodes meet; returns the step that all their ranks continue from, -1 without one."""
        self.round += 1
        starts: dict[int, Start] = {}
        for k, node in enumerate(self.nodes):
            place = NodePlace(
                attempt=0, round=self.round, index=k, uids=tuple(map(self.uid, range(NODES))),
                ranks=RANKS,
            )  # fmt: skip
            with self.acting(f"agent {k}"):
                node.begin(place)
        while len(starts) < NODES:
            self.clock.now += FLUSH_SECONDS / 4
            for k, node in enumerate(self.nodes):
                if k not in starts:
                    with self.acting(f"agent {k}"):
                        if (start := node.choose()) is not None:
                            starts[k] = start
        found = {self.read(k * RANKS + rank) for k in range(NODES) for rank in range(RANKS)}
        assert len(found) == 1, f"ranks continue from {found}"
        return found.pop()[0]

    def as_rank(self, rank: int) -> None:
        os.environ["RANK"] = str(rank)
        os.environ[START_VARIABLE] = str(self.nodes[rank // RANKS].start_path)

    def read(self, rank: int) -> tuple[int, str]:
        """The step that a rank continues from, and the round that wrote what it reads: the file of its own, or the
        one of rank 0 that all read."""
        self.as_rank(rank)
        folder = latest_checkpoint()
        if folder is None:
            return -1, ""
        step, writer = (folder / f"rank{rank if self.writes(rank) else 0}.pt").read_text().split()
        assert folder.name == f"step-{step}"
        return int(step), writer

    def save(self, step: int) -> None:
        saves = []
        for rank in range(NODES * RANKS):
            self.as_rank(rank)
            with self.acting(f"rank {rank}"):
                save = checkpoint_dir(step)
                folder = save.__enter__()
                if self.writes(rank):
                    (folder / f"rank{rank}.pt").write_text(f"{step} {self.round}")
                saves.append(save)
        for rank, save in enumerate(saves):
            self.as_rank(rank)
            with self.acting(f"rank {rank}"):
                save.__exit__(None, None, None)

    def tick(self, *, times: int = 2, is_over: bool = False) -> None:
        for _ in range(times):
            for k, node in enumerate(self.nodes):
                self.clock.now += 1.0
                with self.acting(f"agent {k}"):
                    if self.replicas:
                        self.replicate(k)
                    node.tick(is_over=is_over)

    def train(self, steps: int) -> None:
        step = self.begin_round()
        while step < steps:
            step += 1
            self.save(step)
            self.tick(times=1)
        self.tick(times=4, is_over=True)

    def after_crash(self) -> None:
        """A dead agent's folder is removed by its guardian, and another agent takes its place."""
        assert self.victim is not None
        kind, number = self.victim.name.split()
        self.victim = None
        if kind == "agent":
            shutil.rmtree(self.nodes[int(number)].local)
            self.nodes[int(number)] = self.new_node(int(number))


def each(rank: int) -> bool:
    return True


def rank_0(rank: int) -> bool:
    return rank == 0


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(START_VARIABLE, "")
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.mark.parametrize(("writes", "replicas"), [(each, False), (rank_0, False), (each, True)])
@pytest.mark.parametrize("name", ["rank 0", "rank 3", "agent 0", "agent 1"])
def test_a_crash_at_any_write_leaves_whole_ones(
    tmp_path: Path, name: str, writes: Callable[[int], bool], replicas: bool
) -> None:
    at, is_reached = 0, True
    while is_reached:
        victim = Victim(name, at)
        world = World(tmp_path / str(at), victim, writes=writes, replicas=replicas)
        try:
            world.train(2)
        except Crash:
            world.after_crash()
            world.train(2)
        is_reached = victim.is_dead
        assert world.newest == 2, f"crashed at write {at}"
        assert targets_in(world.shared, UID) == []
        assert len(committed_steps(world.shared)) <= 2, "one more than --checkpoint-keep: what the round began with"
        shutil.rmtree(tmp_path / str(at))
        at += 1
    assert at > 8, "the crashes hit something"


def test_an_exception_inside_leaves_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, None, writes=each)
    world.begin_round()
    saves = []
    for rank in range(NODES * RANKS):
        world.as_rank(rank)
        saves.append(checkpoint_dir(7))
        (saves[-1].__enter__() / "half").write_text("x")
    for rank, save in enumerate(saves):
        world.as_rank(rank)
        save.__exit__(*((ValueError, ValueError(), None) if rank == 1 else (None, None, None)))
    assert [name for name in os.listdir(world.nodes[0].local) if "-7-" in name] == []
    world.save(8)
    world.tick(times=4)
    assert committed_steps(world.shared) == [8]


def test_files_of_other_nodes_are_seen_beside_the_own_ones(tmp_path: Path) -> None:
    """As a distributed checkpoint needs it, whose metadata is on the first node alone."""
    world = World(tmp_path, None, writes=lambda rank: rank in (0, 1, 2))
    world.train(1)
    world.begin_round()
    world.as_rank(3)
    folder = latest_checkpoint()
    assert folder is not None
    assert folder.parent.parent == world.nodes[1].local
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "rank0.pt": "1 0", "rank1.pt": "1 0", "rank2.pt": "1 0",
    }  # fmt: skip


@pytest.mark.parametrize("replicas", [False, True])
def test_a_lost_node_is_made_up_for_by_its_neighbour(tmp_path: Path, replicas: bool) -> None:
    world = World(tmp_path, Victim("agent 1", 10**9), writes=each, replicas=replicas)
    world.begin_round()
    world.save(1)
    world.tick(times=3)
    world.save(2)
    if replicas:
        for k in (0, 1, 0):
            world.replicate(k)
    world.after_crash()
    assert world.begin_round() == (2 if replicas else 1)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize(("replicas", "is_copied", "last"), [(False, False, 1), (True, False, 2), (False, True, 2)])
def test_a_run_that_ends_with_a_lost_node_waits_for_no_part_of_it(
    tmp_path: Path, lost: int, replicas: bool, is_copied: bool, last: int
) -> None:
    world = World(tmp_path, None, writes=each, replicas=replicas)
    world.begin_round()
    world.save(1)
    world.tick(times=3)
    world.save(2)
    if replicas:
        for k in (0, 1, 0):
            world.replicate(k)
    if is_copied:  # by the lost one, before it was
        world.nodes[0].tick()
        world.nodes[lost].tick()
    shutil.rmtree(world.nodes[lost].local)
    left = world.nodes[1 - lost]
    left.is_ending, left.gone = True, {world.uid(lost): "n1"}
    ticks = 0
    while left.tick(is_over=True):
        ticks += 1
        assert ticks < 4, "it waits"
    left.finish()
    assert committed_steps(world.shared)[-1] == last
    assert not [name for name in os.listdir(world.shared) if name.startswith(".")]
    lacking = [event for event in world.events if isinstance(event, CheckpointNotCommitted)]
    assert [(event.step, event.last_step) for event in lacking] == ([(2, 1)] if last == 1 else [])


def test_two_different_files_of_one_name_are_no_checkpoint(tmp_path: Path) -> None:
    world = World(tmp_path, None, writes=each)
    world.begin_round()
    for rank in range(NODES * RANKS):
        world.as_rank(rank)
        with checkpoint_dir(1) as folder:
            (folder / "model.pt").write_text(str(rank // RANKS))
    world.tick(times=4)
    assert os.listdir(world.shared) == []
    assert "model.pt: two nodes wrote different files" in world.events[-1].reason  # type: ignore[attr-defined]


def test_what_is_no_checkpoint_of_ours_is_never_removed(tmp_path: Path) -> None:
    world = World(tmp_path, None, writes=each)
    (world.shared / "notes").mkdir()
    (world.shared / "other").write_text("x")
    world.train(3)
    assert sorted(os.listdir(world.shared)) == ["notes", "other", "step-3"]
    assert INDEX_NAME in os.listdir(world.shared / "step-3")


def test_the_end_of_an_attempt_leaves_the_copies_of_a_later_one(tmp_path: Path) -> None:
    world = World(tmp_path, None, writes=each)
    world.begin_round()
    for attempt in (0, 1):
        (world.shared / f".step-9.{UID[:8]}.{attempt}.0.2").mkdir()
        (world.shared / f".replica-9.{UID[:8]}.{attempt}.0.2").mkdir()
    (world.shared / f".gone-.step-8.{UID[:8]}.0.0.2").mkdir()  # another node wrote there as it was being removed
    for node in world.nodes:
        node.finish()
    assert {saving.attempt for saving in targets_in(world.shared, UID)} == {1}
    assert len(os.listdir(world.shared)) == 2


@pytest.mark.parametrize("prefix", [".step-9", ".replica-9"])
def test_what_a_dead_run_left_half_copied_is_removed_and_no_other(tmp_path: Path, prefix: str) -> None:
    world = World(tmp_path, None, writes=each)
    world.begin_round()
    ages = {"deadbeef": 10 * DEAD_SECONDS, "a11ec0de": 0.5 * DEAD_SECONDS, "c0ffee00": 0.0}
    for uid, age in ages.items():
        files = world.shared / f"{prefix}.{uid}.0.0.2" / "files"
        files.mkdir(parents=True)
        (files / "rank0.pt").touch()
        since = time.time() - age
        for path in (files.parent, files, files / "rank0.pt"):
            # One that is copied for long changes in its file alone.
            os.utime(path, (since, since) if uid != "c0ffee00" or path.is_file() else (0, 0))
    world.save(10)
    world.tick(times=4)
    assert committed_steps(world.shared) == [10]
    left = {name.split(".")[2] for name in os.listdir(world.shared) if name.startswith(prefix)}
    assert left == {"a11ec0de", "c0ffee00"}


@pytest.mark.parametrize(("room", "fits"), [(2500, 2), (1500, 1), (700, 0)])
def test_a_checkpoint_that_never_fits_is_one_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, fits: int
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    world = World(tmp_path, None, writes=each, room=room)
    world.begin_round()

    def save(step: int) -> None:
        for rank in range(RANKS):
            world.as_rank(rank)
            with checkpoint_dir(step) as folder:
                (folder / f"rank{rank}.pt").write_bytes(bytes(500))

    for step in range(fits):
        save(step)
    if fits < 2:
        with pytest.raises(OSError, match=r"no room for .*--checkpoint-local FOLDER:SIZE") as raised:
            save(fits)
        assert raised.value.errno == errno.ENOSPC
    assert len([name for name in os.listdir(world.nodes[0].local) if name.startswith("whole")]) == fits

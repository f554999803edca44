"""What an agent knows at its start: its run, its options, its place in the rendezvous, how many workers."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from hpc_elastic.agent import identity
from hpc_elastic.agent.identity import START_NUMBER_SECONDS, claim_start_number, local_world_size, prepare_session
from hpc_elastic.base import files
from hpc_elastic.base.files import make_private_dir, read_bytes
from hpc_elastic.errors import UsageError
from hpc_elastic.rendezvous.coordination import RendezvousSession
from hpc_elastic.rendezvous.participant import OBSERVER_NODE
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.store.file_store import StoreFullError
from tests.rigs.captures import VERSIONS, captured
from tests.rigs.fake_clock import FakeClock
from tests.rigs.memory_store import MemoryStore
from tests.rigs.specs import make_attempt, make_spec


def meet(tmp_path: Path, node: int, **conf: str) -> RendezvousSession:
    return prepare_session(
        spec=make_spec(cluster="local", rdzv_conf=conf),
        attempt=make_attempt(cluster="local", nodes=("n1", "n2")),
        store=tmp_path / "store",
        secret=b"s" * 32,
        uid="00000-n1-0000000000000001-abcd",
        node=node,
        host="n1",
        local_world_size=2 if node >= 0 else 0,
        decide_restart=lambda *_: pytest.fail("asked before anything has failed"),
        clock=FakeClock(),
    )


@pytest.mark.parametrize("node", [0, OBSERVER_NODE])
def test_the_address_that_peers_read_is_the_notifiers(tmp_path: Path, node: int) -> None:
    session, silent = (meet(tmp_path / "a mount that hangs", node, **conf) for conf in ({}, {"doorbell": "off"}))
    assert (session.info.node, session.info.port) == (node, session.notifier.port)
    assert session.info.addresses == ("127.0.0.1",)
    assert (silent.notifier, silent.info.port) == (None, 0)
    assert list(tmp_path.iterdir()) == [], "no file is touched before the thread runs"


def test_nodes_beyond_max_are_spares(tmp_path: Path) -> None:
    assert [meet(tmp_path, node).info.spare for node in (OBSERVER_NODE, 0, 1)] == [False, False, True]


class Refusing(MemoryStore):
    """Its listings fail so many times, or show nothing; or it is full."""

    hides, full = 0, False

    def __init__(self, *, fails: int = 0) -> None:
        super().__init__()
        self.fails = fails

    def list(self, folder: str) -> list[str]:
        if self.fails:
            self.fails -= 1
            raise OSError(5, "Input/output error")
        if self.hides:
            self.hides -= 1
            return []
        return super().list(folder)

    def put_if_absent(self, key: str, value: str) -> bool:
        if self.full:
            raise StoreFullError(root="store", why="full")
        return super().put_if_absent(key, value)


def start(store: MemoryStore, node: int = 3) -> int:
    return claim_start_number(lambda: store, node, clock=FakeClock())


def test_each_start_of_a_node_has_the_next_number() -> None:
    store = MemoryStore()
    assert [start(store), start(store), start(store, node=4), start(store)] == [1, 2, 1, 3]


@pytest.mark.parametrize("trouble", [{"hides": 2}, {"fails": 7}, {"full": True}])
def test_no_passing_trouble_of_the_store_holds_up_a_start(trouble: dict[str, int]) -> None:
    """What a cache hides is found out by the refusal."""
    store = Refusing()
    for _ in range(3):
        start(store)
    vars(store).update(trouble)
    assert start(store) == 4


def test_a_filesystem_that_goes_on_refusing_is_told_of() -> None:
    clock = FakeClock()
    with pytest.raises(OSError, match="Input/output"):
        claim_start_number(lambda: Refusing(fails=10**6), 0, clock=clock)
    assert clock.now - 1000.0 >= START_NUMBER_SECONDS - 1


def captured_environment(version: str, name: str) -> dict[str, str]:
    _, text, _ = captured(version, name)
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


@pytest.mark.parametrize(
    ("asked", "visible", "expected"),
    [
        *((str(number), "0,1", number) for number in (1, 4, 128)),
        # Outside of Slurm auto counts the visible GPUs.
        *(("auto", "0", 1), ("auto", "0,1,2,3", 4), ("auto", "GPU-8932f937,GPU-46a3", 2)),
        *(("auto", "", 1), ("auto", None, 1), ("auto", "NoDevFiles", 1)),
    ],
)
def test_a_number_is_that_number_and_auto_the_visible_gpus(asked: str, visible: str | None, expected: int) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert local_world_size(asked, env) == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_auto_in_a_job_is_what_slurm_gave_this_node(version: str) -> None:
    with_gpus = captured_environment(version, "env-gres-gpu2-step-n3-task0")
    without = captured_environment(version, "env-plain-step-n1-task0")
    assert local_world_size("auto", with_gpus) == local_world_size("gpu", with_gpus) == 2
    assert local_world_size("auto", without) == 1


@pytest.mark.parametrize(
    ("env", "way_out"),
    [
        (captured_environment("22.05.8", "env-plain-step-n1-task0"), "--gpus-per-node"),
        ({}, "/nvidia*); give the number of workers"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='' names no GPU; unset it"),
    ],
    ids=["in a job", "outside", "hidden"],
)
def test_gpu_on_a_node_without_is_refused_with_the_way_out(tmp_path: Path, env: dict[str, str], way_out: str) -> None:
    with pytest.raises(UsageError, match=rf"--nproc-per-node gpu: .*{re.escape(way_out)}"):
        local_world_size("gpu", env, devices=tmp_path)


def test_gpu_outside_of_slurm_is_all_that_the_machine_has(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        (tmp_path / name).touch()
    assert local_world_size("gpu", {}, devices=tmp_path) == 3
    assert local_world_size("gpu", {"CUDA_VISIBLE_DEVICES": "1"}, devices=tmp_path) == 1
    assert local_world_size("auto", {}, devices=tmp_path) == 1, "it is the default, on workstations too"


def test_cpu_is_the_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5} if pid == 0 else set())
    assert local_world_size("cpu", {}) == 3


@pytest.mark.parametrize("asked", ["0", "-1", "many", "", "1.5", "GPU", "4 "])
def test_anything_else_is_refused_by_its_value(asked: str) -> None:
    with pytest.raises(UsageError, match=r"--nproc-per-node") as caught:
        local_world_size(asked, {})
    assert f"--nproc-per-node {asked}:" in str(caught.value)


SPEC = make_spec(created_ns=1, cluster="local")


ATTEMPT = make_attempt(cluster="local", started_ns=1)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path)
    SPEC.save(found.run_json)
    make_private_dir(found.attempt(0).root)
    ATTEMPT.save(found.attempt(0).attempt_json)
    return found


@pytest.mark.parametrize("file", ["run.json", "attempt.json"])
@pytest.mark.parametrize(
    ("why", "tries"),
    [("refused", 124), ("missing", 1), ("cut off", 1), ("says [Errno 5]", 1)],
)
def test_a_fault_of_the_filesystem_is_waited_out_and_no_other(
    file: str, why: str, tries: int, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = paths.run_json if file == "run.json" else paths.attempt(0).attempt_json
    looks = []

    def read(path: Path, *, limit: int) -> bytes:
        if path != wanted:
            return read_bytes(path, limit=limit)
        looks.append(path)
        if why == "refused":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read_bytes(path, limit=limit)

    monkeypatch.setattr(files, "read_bytes", read)
    monkeypatch.setattr(files, "ask_about", lambda folder: False)
    if why == "missing":
        wanted.unlink()
    elif why == "cut off":
        wanted.write_text('{"version": 1, "unreadable')
    elif why == "says [Errno 5]":
        wanted.write_text('{"version": "unreadable: [Errno 5]"}')
    error, words = (
        (identity.RunDirectoryRefusedError, "refuses")
        if why == "refused"
        else (UsageError, "can't be read from this node")
    )
    with pytest.raises(error, match=words):
        identity._load(paths, 0, FakeClock())
    assert len(looks) == tries


def test_a_fault_that_passes_costs_an_agent_only_time(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [OSError(errno.ESTALE, "Stale file handle"), OSError(errno.EIO, "Input/output error")]

    def read(path: Path, *, limit: int) -> bytes:
        if faults:
            raise faults.pop()
        return read_bytes(path, limit=limit)

    monkeypatch.setattr(files, "read_bytes", read)
    clock = FakeClock()
    began = clock.monotonic()
    assert identity._load(paths, 0, clock) == (SPEC, ATTEMPT)
    assert clock.monotonic() - began == pytest.approx(0.15)


@pytest.mark.parametrize(
    "argv",
    [
        ["--run-dir", "/r"],
        ["--run-dir", "/r", "--attempt"],
        ["--run-dir", "/r", "--attempt", "x"],
        ["--run-dir", "/r", "--attempt", "3", "--node", "-1"],
        ["--run-dir", "/r", "--attempt", "3", "--attempt", "4"],
        ["--run-dir", "/r", "--attempt", "3", "--nodes", "1"],
        ["--run-dir=/r", "--attempt=3"],
    ],
)
def test_options_that_no_launcher_gives_are_refused(argv: list[str]) -> None:
    with pytest.raises(UsageError, match="give --run-dir DIR --attempt N"):
        identity.parse_options(argv)


def test_options_of_launchers() -> None:
    found = identity.parse_options(["--attempt", "0", "--node", "2", "--run-dir", "/r s", "--launcher-pid", "17"])
    assert (found.run_dir, found.attempt, found.node, found.launcher_pid) == ("/r s", 0, 2, 17)

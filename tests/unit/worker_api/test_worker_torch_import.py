"""What torch's import starts in a worker, and what the worker's script changed of the rendezvous."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import hpc_elastic
from hpc_elastic.worker_api import flight_recorder, heartbeat, torch_import
from hpc_elastic.worker_api.flight_recorder import VARIABLE
from hpc_elastic.worker_api.records import COLLECTIVES, read_record
from hpc_elastic.worker_api.torch_import import STORE_VARIABLE, look_at_rendezvous, start

ROOT = Path(__file__).parents[3]
DUMP = b'{"entries":[{}]}'


class Torch(SimpleNamespace):
    """As much of torch as is asked for."""

    def __init__(self, version: str) -> None:
        self.asked, self.groups = threading.Event(), list[tuple[int, int]]()
        super().__init__(__version__=version, _C=SimpleNamespace(_distributed_c10d=SimpleNamespace()))
        self._C._distributed_c10d._dump_fr_trace_json = self.dump

    def dump(self, *arguments: bool) -> bytes:
        if arguments == (False,):
            return json.dumps(
                {"pg_status": {str(n): {"last_completed_collective": str(done)} for n, done in self.groups}}
            ).encode()
        self.asked.set()
        return DUMP


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    fake = Torch("2.13.0+cpu")
    monkeypatch.setitem(sys.modules, "torch", fake)  # type: ignore[arg-type]
    return fake


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    found: list[Callable[[], None]] = []
    monkeypatch.setattr(flight_recorder.atexit, "register", lambda call, *rest: found.append(lambda: call(*rest)))
    return found


def test_torch_calls_it() -> None:
    section = (ROOT / "pyproject.toml").read_text().partition('[project.entry-points."torch.backends"]\n')[2]
    assert section.startswith(f'hpc_elastic = "{torch_import.__name__}:start"\n')


def test_a_byte_brings_a_dump(ask: Callable[..., Path], torch: Torch, at_exit: list[Callable[[], None]]) -> None:
    dump = ask(start, b"1", "json")
    assert dump.read_bytes() == DUMP
    assert dump.stat().st_mode & 0o077 == 0
    assert len(at_exit) == 1


def test_a_script_that_dies_of_an_exception_leaves_its_dump_and_another_does_not(
    tmp_path: Path, torch: Torch, at_exit: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "x"))
    start()
    monkeypatch.delattr(sys, "last_value", raising=False)
    at_exit[0]()
    assert not list(tmp_path.glob("*.json"))
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    at_exit[0]()
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_completed_collectives_are_its_progress_until_steps_are_known(page: Path, torch: Torch) -> None:
    def found() -> tuple[int, bool] | None:
        record = COLLECTIVES.read(page.read_bytes())
        return record and (record[0], record[3])

    collectives = flight_recorder._Collectives(heartbeat.note_collectives)
    assert collectives.note()
    assert found() is None, "a process without a group, and the page may be another's"
    torch.groups = [(0, 30), (1, 3), (2, -1)]
    assert collectives.note()
    assert found() == (33, False)
    first = COLLECTIVES.read(page.read_bytes())
    torch.groups = [(0, 5)]
    assert collectives.note()
    assert found() == (38, False), "its groups were destroyed, and others have come"
    collectives.note(is_final=True)
    assert found() == (38, True)
    last = COLLECTIVES.read(page.read_bytes())
    assert (last[1], last[2] > last[1]) == (first[1], True)
    assert read_record(page.read_bytes()) is None, "it is no heartbeat, and ends no section"

    hpc_elastic.heartbeat()
    assert flight_recorder._Collectives(heartbeat.note_collectives).note(), "a heartbeat without a step"
    hpc_elastic.heartbeat(step=1)
    assert not flight_recorder._Collectives(heartbeat.note_collectives).note()


def test_outside_of_a_run_and_without_its_folder_nothing_happens(
    tmp_path: Path, torch: Torch, at_exit: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    start()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone" / "x"))
    start()
    assert not at_exit


@pytest.mark.parametrize(("version", "is_old"), [("2.5.1", True), ("2.8.0a0+git1", True), ("2.13.0+cpu", False)])
def test_an_older_torch_finds_the_names_that_it_knows(
    tmp_path: Path, at_exit: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch, version: str, is_old: bool
) -> None:
    monkeypatch.setitem(sys.modules, "torch", Torch(version))  # type: ignore[arg-type]
    monkeypatch.setenv(VARIABLE, str(tmp_path / "x"))
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "x")
    monkeypatch.delenv("TORCH_NCCL_TRACE_BUFFER_SIZE")
    start()
    assert os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE") == ("2000" if is_old else None)


OURS = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "r 1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29501",
    STORE_VARIABLE: "r 1 10.0.0.1 29501",
}
SET = "the script set MASTER_ADDR/MASTER_PORT itself, to "


@pytest.mark.parametrize(
    ("url", "changes", "is_kept", "said"),
    [
        ("env://", {}, True, ""),
        ("env://", {"MASTER_PORT": "29500"}, False, f"{SET}10.0.0.1:29500; the run's are 10.0.0.1:29501"),
        ("env://", {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, False, f"{SET}localhost:1; "),
        ("env://", {"MASTER_ADDR": "127.0.0.1"}, True, f"{SET}127.0.0.1:29501; "),
        ("env://", {"MASTER_PORT": ""}, True, ""),
        # torchrun in a worker serves a store of its own, and says so with its own run's id.
        ("env://", {"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}, True, ""),
        ("tcp://10.0.0.1:29501?rank=0&world_size=2", {}, True, ""),
        ("tcp://h7:23456?rank=0&world_size=2", {}, False, "the script set init_method to tcp://h7:23456; the run's"),
    ],
)
def test_the_agents_store_is_not_waited_for_elsewhere(
    url: str, changes: dict[str, str], is_kept: bool, said: str
) -> None:
    env = {**OURS, **changes}
    found = look_at_rendezvous(url, env)
    assert found.startswith(said)
    assert bool(found) == bool(said)
    assert ("TORCHELASTIC_USE_AGENT_STORE" in env) is is_kept


@pytest.mark.parametrize(
    ("content", "age", "said"),
    [("", 100.0, ""), ("x", 9e9, ""), ("x", 5.0, "an earlier round or run left the file "), (None, 5.0, "")],
)
def test_a_file_that_is_older_than_the_process_is_named(
    tmp_path: Path, content: str | None, age: float, said: str
) -> None:
    path = tmp_path / "meet"
    if content is not None:
        path.write_text(content)
        os.utime(path, (1e9, 1e9))
    found = look_at_rendezvous(f"file://{path}?rank=0&world_size=2", {}, age)
    assert found.startswith(said)
    assert (str(path) in found) is bool(said)

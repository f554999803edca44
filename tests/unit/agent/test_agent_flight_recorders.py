"""The flight recorder's variables, pipes and files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpc_elastic.agent.flight_recorders import FlightRecorders, open_call
from hpc_elastic.failures.flight_dump import rank_of_name, read_dump, tail_of
from hpc_elastic.run.progress import AwaitedCall, FlightTail, TailTrack
from hpc_elastic.worker_api.flight_recorder import VARIABLE
from tests.rigs.fake_clock import FakeClock

DATA = Path(__file__).parents[2] / "data"
ENTRY = {"profiling_name": "gloo:all_reduce", "process_group": ["0", "default_pg"], "collective_seq_id": 7}
DUMP = json.dumps({"version": "2.10", "entries": [{**ENTRY, "state": "scheduled"}]})


def test_what_a_rank_waits_in() -> None:
    found = tail_of(
        [read_dump((DATA / "flight_recorder" / "gloo_2.13_never_0").read_bytes(), rank=rank_of_name("x_0"))]
    )
    assert open_call(found) == "all_reduce #6 of group default_pg"
    call = AwaitedCall(name="all_reduce", group="0")
    assert (
        open_call(FlightTail(calls=(call,), tracks=(TailTrack(group="0", sequences=(4,), calls=(0,), done=(1,)),)))
        == ""
    )


# -- the watch ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    (tmp_path / "rank").mkdir()
    return tmp_path / "own"


def recorders(folder: Path | None) -> FlightRecorders:
    return FlightRecorders(folder, round_index=0, clock=FakeClock())


def listening(path: str) -> int:
    os.mkfifo(path)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)


def test_workers_dump_into_the_agents_own_folder_and_a_users_variables_stay(folder: Path) -> None:
    found = recorders(folder).environment(5, {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_FR_BUFFER_SIZE": "9"})
    assert found["TORCH_FR_DUMP_TEMP_FILE"].startswith(f"{folder}/")
    assert found["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"].startswith(f"{folder}/")
    assert found["TORCH_INCLUDE_STACK_TRACE"] == "0"
    assert not {"TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_BUFFER_SIZE"} & found.keys()
    assert recorders(folder).environment(5, {})["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert "TORCH_FR_BUFFER_SIZE" not in recorders(folder).environment(5, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "100"})


def test_without_a_folder_there_is_nothing(folder: Path) -> None:
    none = recorders(None)
    assert none.environment(0, {}) == {}
    assert not none.ask([0])
    none.forget(0)
    assert none.read(0, folder) is None


def test_who_listens_is_asked_and_waited_for(folder: Path, tmp_path: Path) -> None:
    some = recorders(folder)
    prefix = some.environment(3, {})[VARIABLE]
    nccl = some.environment(3, {})["TORCH_FR_DUMP_TEMP_FILE"]
    assert not some.ask([3])  # neither torch nor anything else is there
    gloo_pipe, nccl_pipe = listening(f"{prefix}.77.ask"), listening(f"{nccl}3.pipe")
    os.mkfifo(f"{prefix}.78.ask")  # of a process that has ended
    assert some.ask([3])
    assert os.read(gloo_pipe, 9) == os.read(nccl_pipe, 9) == b"1"
    assert not some.have_answered()
    Path(f"{prefix}.77.json").write_text(DUMP)
    assert not some.have_answered()
    Path(f"{nccl}3").write_text(DUMP.replace("gloo:", "nccl:"))
    os.utime(f"{nccl}3", (FakeClock().time_ns() / 1e9 - 1,) * 2)
    assert some.have_answered()

    found = recorders(folder)
    found._began_ns = 0
    tail = found.read(3, tmp_path / "rank")
    assert {(track.backend, track.sequences) for track in tail.tracks} == {("gloo", (7,)), ("nccl", (7,))}
    kept = tmp_path / "rank" / "flight-recorder-3.json"
    assert kept.read_text() == DUMP
    assert kept.stat().st_mode & 0o077 == 0

    some.forget(3)
    assert not list(folder.iterdir())
    os.close(gloo_pipe)
    os.close(nccl_pipe)


def test_an_earlier_jobs_dump_under_a_users_name_is_not_taken(folder: Path, tmp_path: Path) -> None:
    mine = recorders(folder)
    mine.environment(0, {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "mine_")})
    (tmp_path / "mine_0").write_text(DUMP)
    os.utime(tmp_path / "mine_0", (1, 1))
    assert mine.read(0, tmp_path / "rank") is None
    mine._began_ns = 0
    assert mine.read(0, tmp_path / "rank") is not None


def test_half_a_dump_is_kept_and_says_nothing(folder: Path, tmp_path: Path) -> None:
    some = recorders(folder)
    some._began_ns = 0
    Path(some.environment(0, {})[VARIABLE] + ".5.json").write_text(DUMP[:-9])
    assert some.read(0, tmp_path / "rank") is None
    assert (tmp_path / "rank" / "flight-recorder-0.json").exists()

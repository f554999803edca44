""""""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_elastic.agent.metrics import JsonlMetrics, NoMetrics, PrometheusMetrics, RoundFigures, open_metrics
from hpc_elastic.agent.supervision import WorkerState
from hpc_elastic.run.option_values import parse_metrics
from tests.rigs.fake_clock import FakeClock


def test_json_lines_have_a_time_and_the_labels(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    sink = JsonlMetrics(path, labels={"host": "n1"}, clock=FakeClock())
    sink.put("workers.default.remaining_restarts", 3)
    sink.put("workers.default.healthy", 1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["name"], line["value"], line["host"]) for line in lines] == [
        ("workers.default.remaining_restarts", 3, "n1"),
        ("workers.default.healthy", 1, "n1"),
    ]
    assert all(isinstance(line["t"], int) for line in lines)


def test_prometheus_reads_the_newest_values_and_one_state(tmp_path: Path) -> None:
    path = tmp_path / "hpc.prom"
    sink = PrometheusMetrics(path, labels={"host": 'a"b'})
    for state in ("init", "healthy"):
        sink.put(f"workers.my.role.{state}", 1)
    sink.put("workers.my.role.remaining_restarts", 3)
    sink.put("workers.my.role.remaining_restarts", 2)
    lines = path.read_text().splitlines()
    assert 'hpc_elastic_workers_remaining_restarts{host="a\\"b",role="my.role"} 2' in lines
    assert 'hpc_elastic_workers_state{host="a\\"b",role="my.role",state="healthy"} 1' in lines
    assert 'hpc_elastic_workers_state{host="a\\"b",role="my.role",state="init"} 0' in lines
    assert lines.count("# TYPE hpc_elastic_workers_state gauge") == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o644, "the collector is another user"
    assert [other.name for other in tmp_path.iterdir()] == ["hpc.prom"]


def test_a_disk_that_refuses_raises_nothing(tmp_path: Path) -> None:
    for sink in (JsonlMetrics(tmp_path / "no" / "x"), PrometheusMetrics(tmp_path / "no" / "x.prom")):
        sink.put("workers.default.healthy", 1)


def test_the_option(tmp_path: Path) -> None:
    assert isinstance(open_metrics(None, labels={}), NoMetrics)
    lines = open_metrics(parse_metrics(f"jsonl:{tmp_path}/{{host}}.jsonl"), labels={"host": "n7"})
    lines.put("workers.default.healthy", 1)
    assert (tmp_path / "n7.jsonl").exists()
    assert isinstance(open_metrics(parse_metrics(f"prometheus:{tmp_path}/a.prom"), labels={}), PrometheusMetrics)


class Later:
    """A disk that hangs: what is to be written waits until a test says so."""

    def __init__(self) -> None:
        self.posted: list[Callable[[], object]] = []

    def __call__(self, action: Callable[[], object]) -> None:
        self.posted.append(action)

    def run(self) -> int:
        posted, self.posted = self.posted, []
        for action in posted:
            action()
        return len(posted)


def test_while_a_disk_hangs_json_lines_wait_and_are_not_without_bound(tmp_path: Path) -> None:
    path, later = tmp_path / "x.jsonl", Later()
    sink = JsonlMetrics(path, post=later)
    for number in range(1500):
        sink.put("workers.default.n", number)
    assert not path.exists()
    assert later.run() == 1, "one thing waits behind the disk, however much there is to write"
    values = [json.loads(line)["value"] for line in path.read_text().splitlines()]
    assert values == list(range(500, 1500))
    sink.put("workers.default.n", 0)
    assert later.run() == 1
    assert len(path.read_text().splitlines()) == 1001


def test_while_a_disk_hangs_the_newest_state_waits(tmp_path: Path) -> None:
    path, later = tmp_path / "x.prom", Later()
    sink = PrometheusMetrics(path, post=later)
    for number in range(10):
        sink.put("workers.default.n", number)
    assert later.run() == 1
    assert 'hpc_elastic_workers_n{role="default"} 9' in path.read_text()
    sink.put("workers.default.n", 10)
    assert later.run() == 1
    assert 'hpc_elastic_workers_n{role="default"} 10' in path.read_text()


@pytest.mark.parametrize("planted", ["link", "dangling link", "fifo", "hard link"])
def test_json_lines_go_to_a_plain_file_alone(tmp_path: Path, planted: str, caplog: pytest.LogCaptureFixture) -> None:
    target, path = tmp_path / "precious", tmp_path / "x.jsonl"
    if planted != "dangling link":
        target.write_text("kept")
    if planted == "fifo":
        os.mkfifo(path)
    elif planted == "hard link":
        os.link(target, path)
    else:
        path.symlink_to(target)
    sink = JsonlMetrics(path)
    for _ in range(3):
        sink.put("workers.default.healthy", 1)
    assert not target.exists() if planted == "dangling link" else target.read_text() == "kept"
    assert len(caplog.messages) == 1
    assert str(path) in caplog.text


def test_a_planted_temporary_file_of_prometheus_is_not_used(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f".a.prom.{os.getpid()}")  # opening it for writing would wait for ever
    PrometheusMetrics(tmp_path / "a.prom").put("workers.default.healthy", 1)
    assert stat.S_IMODE((tmp_path / "a.prom").stat().st_mode) == 0o644


class Sink:
    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    def put(self, name: str, value: float) -> None:
        self.seen.append((name, value))


def test_durations_and_states_are_told_once() -> None:
    sink, clock = Sink(), FakeClock()
    figures = RoundFigures(sink, role="trainer", clock=clock)
    assert figures.end("rendezvous") is None
    figures.begin("rendezvous")
    clock.wait(threading.Event(), 1.25)
    figures.begin("rendezvous")  # asked for again in the same wait
    clock.wait(threading.Event(), 0.25)
    assert figures.end("rendezvous") == 1.5
    assert figures.end("rendezvous") is None
    figures.enter(WorkerState.HEALTHY)
    figures.enter(WorkerState.HEALTHY)
    assert sink.seen == [("workers.trainer.rendezvous_seconds", 1.5), ("workers.trainer.healthy", 1)]

"""The figures of a run, as Prometheus reads them from a file."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_elastic.agent.metrics import PrometheusMetrics, RoundFigures, open_metrics
from hpc_elastic.agent.supervision import WorkerState
from hpc_elastic.run.option_values import parse_metrics
from tests.rigs.fake_clock import FakeClock


def test_prometheus_reads_the_newest_values_and_one_state(tmp_path: Path) -> None:
    path = tmp_path / 'a"b.prom'
    assert open_metrics(None, labels={}) is None
    sink = open_metrics(parse_metrics(f"prometheus:{tmp_path}/{{host}}.prom"), labels={"host": 'a"b'})
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
    assert [other.name for other in tmp_path.iterdir()] == ['a"b.prom']


def test_a_disk_that_refuses_raises_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = PrometheusMetrics(tmp_path / "no" / "x.prom")
    for _ in range(3):
        sink.put("workers.default.healthy", 1)
    (message,) = caplog.messages
    assert str(tmp_path / "no" / "x.prom") in message


def test_while_a_disk_hangs_the_newest_state_waits(tmp_path: Path) -> None:
    path, posted = tmp_path / "x.prom", list[Callable[[], object]]()
    sink = PrometheusMetrics(path, post=posted.append)
    for newest in (9, 10):
        for number in range(newest + 1):
            sink.put("workers.default.n", number)
        (write,) = posted
        posted.clear()
        write()
        assert f'hpc_elastic_workers_n{{role="default"}} {newest}' in path.read_text()


def test_a_planted_temporary_file_of_prometheus_is_not_used(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f".a.prom.{os.getpid()}")  # opening it for writing would wait for ever
    PrometheusMetrics(tmp_path / "a.prom").put("workers.default.healthy", 1)
    assert stat.S_IMODE((tmp_path / "a.prom").stat().st_mode) == 0o644


def test_durations_and_states_are_told_once() -> None:
    seen: list[tuple[str, float]] = []
    clock = FakeClock()
    sink: Any = SimpleNamespace(put=lambda *figure: seen.append(figure))
    figures = RoundFigures(sink, role="trainer", clock=clock)
    assert figures.end("rendezvous") is None
    figures.begin("rendezvous")
    clock.now += 1.25
    figures.begin("rendezvous")  # asked for again in the same wait
    clock.now += 0.25
    assert figures.end("rendezvous") == 1.5
    assert figures.end("rendezvous") is None
    figures.enter(WorkerState.HEALTHY)
    figures.enter(WorkerState.HEALTHY)
    assert seen == [("workers.trainer.rendezvous_seconds", 1.5), ("workers.trainer.healthy", 1)]

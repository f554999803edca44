"""Which error files are read: all that may tell something new, and of a thousand that are alike only some."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.worker_failure import EvidenceSource, WorkerFailure
from hpc_elastic.report import collect
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.history import RoundHistory
from hpc_elastic.report.root_cause import verdict_of
from tests.rigs.run_builder import GLOO, RunBuilder, make_failure

ALIKE = collect.OF_EACH_KIND


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ranks whose error files were looked for."""
    found: list[int] = []
    real = collect.read_failure

    def counted(path: Path, **options: object) -> WorkerFailure | None:
        found.append(int(Path(path).parent.name.removeprefix("rank-")))
        return real(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(collect, "read_failure", counted)
    return found


def begun(root: Path, *, nodes: int = 4, per_node: int = 1) -> RunBuilder:
    return RunBuilder(root / "run-1", nodes=nodes, per_node=per_node).begin()


def ended(builder: RunBuilder, *, at: float = 90) -> RoundHistory:
    """The first round, after which the agents ended."""
    builder.stopped(0, 0, at=at - 1)
    for node in range(builder.nodes):
        builder.event(0, "agent", node, at, "agent_ended", reason="end", code=1)
    return collect_run(builder.root).attempts[0].rounds[0]


def folder_of(builder: RunBuilder, rank: int) -> Path:
    folder = builder.paths.attempt(0).rank(0, rank).root
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700)
    return folder


def test_of_failures_that_are_alike_only_the_first_are_read(tmp_path: Path, looked_at: list[int]) -> None:
    builder = begun(tmp_path, nodes=64, per_node=8)
    order = [(rank * 37) % 512 for rank in range(512)]  # the first ones are anywhere
    for place, rank in enumerate(order):
        text = "ValueError: bad batch 17" if place == 0 else f"RuntimeError: {GLOO.format(rank=rank % 250)}"
        builder.fail(make_failure(rank, at=60 + place / 100, exception=text, per_node=8, last_step=rank))
    for node in range(64):  # as agents do: who failed is told after all have ended
        builder.event(0, "agent", node, 80, "agent_ended", reason="end", code=1)
    part = collect_run(builder.root).attempts[0].rounds[0]
    assert len(part.failures) == 512
    read = [failure for failure in part.failures if failure.source is not EvidenceSource.EVENT]
    assert sorted(failure.global_rank for failure in read) == sorted(order[: ALIKE + 1])
    told = [failure for failure in part.failures if failure.source is EvidenceSource.EVENT]
    assert {failure.failure_class for failure in told} == {FailureClass.SYMPTOM}
    assert {(failure.exception_type, failure.problem) for failure in told} == {("RuntimeError", "")}
    example = next(failure for failure in read if failure.failure_class is FailureClass.SYMPTOM)
    assert example.reason
    assert {failure.reason for failure in told} == {example.reason}
    assert all(failure.last_step == failure.global_rank for failure in told)
    verdict = verdict_of(part)
    assert verdict.failure is not None
    assert (verdict.failure.global_rank, bool(verdict.failure.traceback)) == (order[0], True)


@pytest.mark.parametrize("is_wall_clock_alone", [True, False])
def test_the_first_by_time_is_read_whenever_its_event_was_written(tmp_path: Path, is_wall_clock_alone: bool) -> None:
    """The event follows when the evidence has been gathered, which takes one agent longer than the other."""
    builder = begun(tmp_path, nodes=40)
    for rank in range(40):
        failure = make_failure(rank, at=60 - rank / 100, exception="ValueError: bad")
        builder.fail(replace(failure, ended_uptime_ns=0) if is_wall_clock_alone else failure, told_at=70 + rank)
    verdict = verdict_of(ended(builder, at=200))
    assert verdict.failure is not None
    assert (verdict.failure.global_rank, bool(verdict.failure.traceback)) == (39, True)


def test_the_hung_rank_that_is_furthest_behind_is_read(tmp_path: Path) -> None:
    builder = begun(tmp_path, nodes=40)
    for rank in range(40):
        failure = make_failure(rank, at=60 + rank / 100, exitcode=-6, last_step=70 - (rank == 39))
        hung = replace(failure, failure_class=FailureClass.HANG, fingerprint="hang:x", traceback="Stack (most recent")
        builder.fail(hung)
    verdict = verdict_of(ended(builder))
    assert verdict.failure is not None
    assert (verdict.failure.global_rank, bool(verdict.failure.traceback)) == (39, True)


def test_missing_files_are_made_up_for_by_others_that_are_alike(tmp_path: Path) -> None:
    builder = begun(tmp_path, nodes=64)
    for rank in range(64):
        builder.fail(make_failure(rank, at=60 + rank / 100, exception="ValueError: bad"), error_file=rank >= 8)
    part = ended(builder)
    assert [rank for rank in range(64) if part.failures[rank].traceback] == list(range(8, 8 + ALIKE))
    assert ["missing" in part.failures[rank].problem for rank in (0, 7, 8, 60)] == [True, True, False, False]
    asked = collect_run(builder.root, ranks={3, 50}).attempts[0].rounds[0]
    assert [rank for rank in range(64) if asked.failures[rank].traceback] == [*range(8, 8 + ALIKE), 50]
    (tmp_path / "few").mkdir()
    few = begun(tmp_path / "few", nodes=40)
    for rank in range(40):
        few.fail(make_failure(rank, at=60 + rank / 100, exception="ValueError: bad"), error_file=rank < 3)
    assert ["missing" in failure.problem for failure in ended(few).failures] == [False] * 3 + [True] * 37


def test_no_folder_is_looked_into_where_all_is_told(
    tmp_path: Path, looked_at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []
    real = collect._indices
    monkeypatch.setattr(
        collect, "_indices", lambda folder, parse: [listed.append(Path(folder).name), *real(folder, parse)][1:]
    )
    builder = begun(tmp_path)
    for rank in (1, 3):
        folder_of(builder, rank)
    builder.fail(make_failure(0, at=60, exitcode=3))
    ended(builder)
    assert looked_at == [0]
    assert listed == ["attempt-000"]


@pytest.mark.parametrize(
    ("without", "end_of", "dropped"),
    [
        pytest.param((), (0, 1, 3), "", id="its agent died before it told who failed"),
        pytest.param((), (0, 1, 2, 3), "workers_stopped", id="a full disk took a line"),
        pytest.param((), (0, 1, 2, 3), "worker_failed", id="the line of the failure itself is torn"),
        pytest.param((2,), (0, 1, 2, 3), "", id="its agent told its own end alone"),
        pytest.param((), (0, 1, 2, 3), "{", id="its file is gone"),
        pytest.param((0, 1, 2, 3), (), "", id="nobody has told of any end yet"),
    ],
)
def test_a_failure_that_no_event_tells_of_is_found(
    tmp_path: Path, without: tuple[int, ...], end_of: tuple[int, ...], dropped: str
) -> None:
    builder = begun(tmp_path)
    inner = {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback", "timestamp": "1795000030"}}
    (folder_of(builder, 2) / "error.json").write_text(json.dumps({"message": inner}))
    builder.stopped(0, 0, at=88, without=without)
    if dropped == "worker_failed":
        builder.event(0, "agent", 2, 89, "worker_failed", round=0, rank=2)
    for node in end_of:
        builder.event(0, "agent", node, 90, "agent_ended", reason="end", code=1)
    (path,) = builder.paths.attempt(0).events.glob("agent-00002-*")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not dropped or dropped not in line))
    if dropped == "{":
        path.unlink()
    (part,) = collect_run(builder.root).attempts[0].rounds
    assert [(failure.global_rank, failure.message) for failure in part.failures] == [(2, "ValueError: x")]


def test_what_is_missing_of_the_events_is_said(tmp_path: Path) -> None:
    builder = begun(tmp_path, nodes=6)
    assert collect_run(builder.root).attempts[0].problems == ()
    ended(builder)
    assert collect_run(builder.root).attempts[0].problems == ()
    events = builder.paths.attempt(0).events
    for pattern in ("supervisor-*", "agent-00001-*", "agent-00004-*"):
        (path,) = events.glob(pattern)
        path.unlink()
    (path,) = events.glob("agent-00002-*")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[3][:30], lines[4]]) + "\n")
    assert collect_run(builder.root).attempts[0].problems == (
        "the supervisor's events are missing",
        "no events of 2 of 6 nodes: n2, n5",
        "3 lines of the events of n3 are missing or torn",
    )


def test_the_rank_that_did_not_fail_is_named_where_all_others_gave_up_waiting(tmp_path: Path) -> None:
    builder = begun(tmp_path)
    trace = 'Traceback (most recent call last):\n  File "/u/t.py", line 3, in <module>\n    raise TimeoutError(text)\n'
    said = "TimeoutError: no part within 3 s"
    for rank in (0, 1, 3):
        builder.fail(replace(make_failure(rank, at=60 + rank, exception=said), traceback=trace + said))
    assert "rank 2 did not fail: look there, too" in verdict_of(ended(builder)).evidence

"""What stands on the disk when an attempt ends, at each moment at which whoever writes it may be killed."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.launch.conclude import conclude
from hpc_elastic.launch.requeue import (
    AttemptResult,
    EligibleNodes,
    NextAttempt,
    RequeueAction,
    Requeued,
    RequeueDecision,
    RequeueWay,
)
from hpc_elastic.launch.site import AttemptContext, JobCondition, SlurmAnswer
from hpc_elastic.run.events import EventLog
from hpc_elastic.run.node_score import load_record
from hpc_elastic.run.option_values import RequeueChoice
from hpc_elastic.run.paths import AttemptInfo, Outcome, RunPaths, StoredResult, load_result
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.slurm.commands import SlurmError
from tests.rigs.event_pairs import read_events
from tests.rigs.fake_clock import FakeClock
from tests.rigs.run_builder import START_NS, RunBuilder, make_failure
from tests.rigs.specs import make_attempt, make_spec

NODES = ("n1", "n2", "n3", "n4")
SPEC = make_spec(min_nodes=2, max_nodes=4)
ATTEMPT = make_attempt(nodes=NODES, started_ns=START_NS, job_id="7", requeue_armed=True)
TOO_FEW = AttemptResult(
    outcome=Outcome.TOO_FEW_NODES,
    reason="node n3 was lost",
    retryable=True,
    signal_number=None,
    fingerprint="",
    step=-1,
    seconds=90.0,
)
SUCCESS = replace(TOO_FEW, outcome=Outcome.SUCCEEDED, reason="")


class Site:
    """Remembers what it was asked for, and looks at the disk at that moment."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.plans: list[NextAttempt] = []
        self.next_job = ""
        self.look: Callable[[], None] = lambda: None
        self.answer = SlurmAnswer(JobCondition.RUNNING)

    def ask(self, *, near: float) -> SlurmAnswer:
        return self.answer

    def eligible_nodes(self) -> EligibleNodes:
        known = frozenset((*NODES, "n5", "n6"))
        return EligibleNodes(known=known, usable=known, excluded=("n6",))

    def why_not_without(self, paths: RunPaths, nodes: Sequence[str]) -> None:
        assert tuple(nodes) == ("n3", "n6")

    def stored(self, number: int = 0) -> StoredResult:
        found = load_result(self.paths.attempt(number).result_json)
        assert found is not None
        return found

    def requeue(self, plan: NextAttempt) -> Requeued:
        self.plans.append(plan)
        self.look()
        return Requeued(summary="job 7 is requeued", next_job=self.next_job)


World = tuple[Site, Callable[..., RequeueDecision]]


def end_of(
    site: Site,
    result: AttemptResult,
    *,
    spec: RunSpec = SPEC,
    attempt: AttemptInfo = ATTEMPT,
    clock: Any,
    uid: str = "s",
    events: Path | None = None,
) -> RequeueDecision:
    folder = events or site.paths.attempt(attempt.number).events
    log = EventLog(folder, role="supervisor", host="n1", node=-1, uid=uid, clock=clock)
    context = AttemptContext(paths=site.paths, spec=spec, site=site, attempt=attempt, events=log, clock=clock)  # type: ignore[arg-type]
    decision = conclude(context, result)
    log.close()
    return decision


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A run whose node n3 was lost a minute ago."""
    builder = RunBuilder(tmp_path / "run").begin()
    builder.event(0, "agent", 2, 60, "node_lost", round=0, age=8.0, by=0, reason="silent for 8 s")
    paths = builder.paths
    site = Site(paths)
    builder.clock.now_ns = START_NS + 90 * 10**9

    ends = itertools.count()

    def end(result: AttemptResult = TOO_FEW, *, attempt: AttemptInfo = ATTEMPT, **more: Any) -> RequeueDecision:
        paths.attempt(attempt.number).root.mkdir(exist_ok=True)
        return end_of(site, result, attempt=attempt, clock=builder.clock, uid=f"s{next(ends)}", **more)

    return site, end


def events_of(paths: RunPaths, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(paths.attempt(0).events) if event["event"] == name]


def test_all_is_written_before_slurm_is_asked(world: World) -> None:
    site, end = world
    paths = site.paths

    def look() -> None:
        stored = site.stored()
        assert (stored.action, stored.exit_code, stored.next_job) == ("requeue", 75, "")
        assert load_record(paths.nodes_json).excluded == ("n3",), "before Slurm has it: it would be the user's else"
        assert "n3 (node n3 was lost): left out of later attempts" in paths.attempt(0).report_text.read_text()

    site.look = look
    assert end().action is RequeueAction.REQUEUE
    assert site.plans == [NextAttempt(excluded=("n3", "n6"))]
    (judged,) = events_of(paths, "nodes_judged")
    assert (judged["text"], judged["reason"]) == ("the next attempt excludes n3", "n3: node n3 was lost")
    assert [event["job_id"] for event in events_of(paths, "requeued")] == ["7"]


def test_a_run_whose_directory_was_removed_is_not_requeued(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The next attempt would find no run; and it is said once."""
    site, _ = world
    shutil.rmtree(site.paths.root)
    decision = end_of(site, TOO_FEW, clock=FakeClock(), events=tmp_path / "elsewhere")
    assert decision.action is RequeueAction.END
    assert "the run directory was removed" in decision.reason
    assert site.plans == []
    assert sum("was removed" in record.message for record in caplog.records if record.levelname == "ERROR") == 1
    assert not site.paths.root.exists()


def test_a_follow_on_job_is_kept(world: World) -> None:
    site, end = world
    site.next_job = "8"
    end(attempt=replace(ATTEMPT, requeue_way="chain"), spec=replace(SPEC, requeue_with=RequeueChoice.CHAIN))
    assert [(plan.way, plan.falls_back) for plan in site.plans] == [(RequeueWay.CHAIN, False)]
    assert site.stored().next_job == "8"
    assert [event["job_id"] for event in events_of(site.paths, "requeued")] == ["8"]


@pytest.mark.parametrize(
    ("condition", "action", "code", "reason"),
    [
        pytest.param(
            JobCondition.ENDED, RequeueAction.END, 143, "but the job was cancelled meanwhile",
            id="cancelled as it began: its SIGTERM came before anybody could hear, and srun gets no steps",
        ),
        pytest.param(JobCondition.SILENT, RequeueAction.REQUEUE, 75, "node n3 was lost", id="a silent controller"),
    ],
)  # fmt: skip
def test_a_job_that_was_cancelled_is_not_requeued_though_nobody_heard_it(
    world: World, condition: JobCondition, action: RequeueAction, code: int, reason: str
) -> None:
    site, end = world
    site.answer = SlurmAnswer(condition)
    decision = end()
    assert (decision.action, decision.exit_code) == (action, code)
    assert len(site.plans) == (action is RequeueAction.REQUEUE)
    assert (site.stored().action, site.stored().exit_code) == (action.value, code)
    assert reason in site.paths.attempt(0).report_text.read_text()


def test_a_requeue_that_failed_is_an_end(world: World) -> None:
    site, end = world

    def refuse() -> None:
        raise SlurmError(what="requeueing job 7", why="no")

    site.look = refuse
    decision = end()
    assert (decision.action, decision.exit_code) == (RequeueAction.END, 1)
    assert (site.stored().action, site.stored().exit_code) == ("end", 1)
    for text in (site.stored().decision, site.paths.attempt(0).report_text.read_text()):
        assert "but the requeue failed: requeueing job 7: no" in text


def test_one_that_is_killed_leaves_the_verdict(world: World) -> None:
    """Whether before Slurm was asked or after: the files say "requeue", and Slurm says whether it came about."""
    site, end = world

    class Killed(BaseException):
        pass

    def die() -> None:
        raise Killed

    site.look = die
    with pytest.raises(Killed):
        end()
    assert site.stored().action == "requeue"
    site.look = lambda: None
    assert end().action is RequeueAction.REQUEUE, "an agent that takes over comes to the same"
    assert len({plan.excluded for plan in site.plans}) == 1


def test_an_attempt_that_ends_the_run_asks_slurm_nothing(world: World) -> None:
    site, end = world
    site.eligible_nodes = lambda: pytest.fail("asked")  # type: ignore[method-assign]
    end(SUCCESS)
    assert site.plans == []
    assert [item.node for item in load_record(site.paths.nodes_json).evidence] == ["n3"]


@pytest.mark.parametrize(
    ("error", "is_ours"), [(FileNotFoundError(2, "No such file or directory"), False), (ValueError("odd"), True)]
)
def test_only_a_defect_of_ours_shows_its_traceback(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    is_ours: bool,
) -> None:
    """A run directory that was removed in mid-run is none."""

    def fails(root: Path) -> None:
        raise error

    monkeypatch.setattr("hpc_elastic.report.collect.collect_run", fails)
    _, end = world
    assert end(SUCCESS).action is RequeueAction.END
    (record,) = [record for record in caplog.records if "history can't be read" in record.getMessage()]
    assert bool(record.exc_info) is is_ours


@pytest.mark.parametrize("heard", [True, False])
def test_a_cancelled_job_says_nothing_of_the_nodes_where_no_agent_could_be_started(
    world: World, tmp_path: Path, heard: bool
) -> None:
    site, end = world
    RunBuilder(tmp_path / "run").event(
        0, "supervisor", 3, 61, "node_given_up", name="n4", cause="not_started", reason="srun: aborted"
    )
    site.answer = SlurmAnswer(JobCondition.RUNNING if heard else JobCondition.ENDED)
    end(replace(TOO_FEW, outcome=Outcome.CANCELLED) if heard else TOO_FEW)
    assert {one.node for one in load_record(site.paths.nodes_json).evidence} == {"n3"}


@pytest.mark.parametrize("is_bug", [True, False])
def test_no_node_is_bad_for_what_is_a_bug_in_the_script(tmp_path: Path, is_bug: bool) -> None:
    builder = RunBuilder(tmp_path / "run")
    builder.attempt(0)
    for index in range(2):
        builder.round(0, index, at=1 + 20 * index)
        failure = builder.fail(make_failure(1, at=5 + 20 * index, exitcode=-11, round_index=index))
    site = Site(builder.paths)
    failed = replace(TOO_FEW, outcome=Outcome.FAILED, fingerprint=failure.fingerprint, retryable=not is_bug)
    end_of(site, failed, spec=replace(SPEC, max_requeues=0), clock=builder.clock)
    assert ("Bad nodes" in builder.paths.attempt(0).report_text.read_text()) is not is_bug
    assert len(load_record(builder.paths.nodes_json).evidence) == 2


def test_where_nothing_is_bad_slurm_is_not_asked_for_nodes(tmp_path: Path) -> None:
    """Nor waited for, where it is down."""
    builder = RunBuilder(tmp_path / "run").begin()
    builder.fail(make_failure(1, at=60, exitcode=-11))
    site = Site(builder.paths)
    site.eligible_nodes = lambda: pytest.fail("asked")  # type: ignore[method-assign]
    failed = replace(TOO_FEW, outcome=Outcome.FAILED, reason="restarts exhausted")
    end_of(site, failed, clock=builder.clock)
    assert [plan.excluded for plan in site.plans] == [None]
    assert len(load_record(builder.paths.nodes_json).evidence) == 1


def test_attempts_without_progress_are_counted(world: World) -> None:
    site, end = world
    failed = replace(TOO_FEW, outcome=Outcome.FAILED, reason="restarts exhausted")
    for number, result, idle, delay in (
        (0, failed, 1, 0.0),
        (1, failed, 2, 60.0),
        (2, replace(failed, outcome=Outcome.PREEMPTED), 0, 0.0),
        (3, failed, 1, 0.0),
        (4, replace(failed, seconds=3600.0), 0, 0.0),
        (5, replace(failed, step=100), 0, 0.0),
        (6, replace(failed, step=100), 1, 0.0),
        (7, replace(failed, step=100), 2, 60.0),
        (8, replace(failed, step=101), 0, 0.0),
    ):
        end(result, attempt=replace(ATTEMPT, number=number), spec=replace(SPEC, max_requeues=99))
        assert (number, site.stored(number).idle, site.plans[-1].delay) == (number, idle, delay)

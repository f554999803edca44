"""The next attempt is queued exactly once, whoever dies or is late between any two calls to Slurm."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_elastic.launch.requeue import (
    CONTROLLER_PATIENCE,
    GONE_SECONDS,
    GONE_WITH_EPILOG,
    JobRequeuer,
    NextAttempt,
    RequeueWay,
    follow_on_arguments,
)
from hpc_elastic.slurm.commands import (
    JobId,
    JobNotPendingError,
    RequeueDisabledError,
    SlurmError,
    SlurmPermissionError,
    SlurmUnavailableError,
)
from hpc_elastic.slurm.job_state import JobPhase
from tests.rigs.fake_clock import FakeClock

JOB = JobId("7")
SCRIPT = Path("/runs/r/job.sbatch")
UNAVAILABLE = SlurmUnavailableError(what="x", why="Unable to contact slurm controller")


class Killed(BaseException):
    """This process."""


class World:
    """One job of Slurm's. `before` and `after` are called around every call with its number, and may raise."""

    def __init__(self) -> None:
        self.phase = JobPhase.RUNNING
        self.restarts = 0
        self.has_epilog = False
        self.excluded: tuple[str, ...] = ()
        self.up = frozenset({"n1", "n2", "n3", "n4"})
        self.num_nodes: tuple[int, int] | None = None
        self.waived: float | None = None
        self.began_with: tuple[str, ...] | None = None
        self.submitted: list[Sequence[str]] = []
        self.calls: list[str] = []
        self.refusals: dict[str, Exception] = {}
        self.before: Callable[[int], None] = lambda number: None
        self.after: Callable[[int], None] = lambda number: None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        act = getattr(type(self), f"_{name}")

        def call(*arguments: Any, **keywords: Any) -> Any:
            number = len(self.calls)
            self.calls.append(name)
            self.before(number)
            if name in self.refusals:
                raise self.refusals[name]
            value = act(self, *arguments, **keywords)
            self.after(number)
            return value

        return call

    def _config(self) -> Any:
        return SimpleNamespace(has_epilog=self.has_epilog)

    def _job_state(self, job: JobId) -> Any:
        return SimpleNamespace(
            phase=self.phase, restarts=self.restarts, excluded=self.excluded, required=(), partition="main"
        )

    def _partitions(self, names: str) -> Any:
        assert names == "main"
        return (SimpleNamespace(names=frozenset({"n1", "n2", "n3", "n4"}), usable_names=self.up),)

    def _set_num_nodes(self, job: JobId, least: int, most: int) -> None:
        self._need_pending()
        self.num_nodes = least, most

    def _requeue(self, job: JobId) -> None:
        if self.phase is JobPhase.PENDING:
            raise SlurmError(what="requeueing", why="Job is pending execution")
        self.phase, self.restarts = JobPhase.PENDING, self.restarts + 1

    def _allow_requeue(self, job: JobId) -> None:
        self.refusals.pop("requeue", None)

    def _exclude_nodes(self, job: JobId, nodes: Sequence[str]) -> None:
        self._need_pending()
        self.excluded = tuple(nodes)

    def _start_now(self, job: JobId, *, delay: float = 0.0) -> None:
        self._need_pending()
        self.waived, self.began_with = delay, self.excluded

    def _need_pending(self) -> None:
        if self.phase is not JobPhase.PENDING:
            raise JobNotPendingError(what="x", why="Job is no longer pending execution")

    def _dependents(self, job: JobId, *, uid: int) -> tuple[str, ...]:
        return tuple(str(100 + index) for index in range(len(self.submitted)))

    def _submit(self, script: str, *, extra: Sequence[str]) -> JobId:
        self.submitted.append(extra)
        return JobId(str(99 + len(self.submitted)))


@pytest.fixture(autouse=True)
def _sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def requeuer(world: World, clock: FakeClock | None = None) -> JobRequeuer:
    return JobRequeuer(world, clock or FakeClock(), job=JOB, restart_count=0)  # type: ignore[arg-type]


PLANS = {
    "requeue": NextAttempt(excluded=("n3",)),
    "chain": NextAttempt(way=RequeueWay.CHAIN, script=SCRIPT, excluded=("n3",)),
}


def check_done_once(world: World) -> None:
    if world.submitted:
        assert len(world.submitted) == 1
        assert world.restarts == 0
    else:
        assert (world.restarts, world.phase) == (1, JobPhase.PENDING)
        assert world.began_with == ("n3",), "excluded first: it could begin on the bad node else"


def calls_of(plan: NextAttempt) -> int:
    world = World()
    requeuer(world).carry_out(plan)
    check_done_once(world)
    return len(world.calls)


def _points() -> list[tuple[str, int, str]]:
    return [
        (name, number, when)
        for name in PLANS
        for number in range(calls_of(PLANS[name]))
        for when in ("before", "after")
    ]


@pytest.fixture(params=_points(), ids=lambda point: f"{point[0]}-{point[2]}{point[1]}")
def point(request: pytest.FixtureRequest) -> tuple[str, int, str]:
    found: tuple[str, int, str] = request.param
    return found


def _at(world: World, point: tuple[str, int, str], act: Callable[[], None]) -> None:
    def once(number: int) -> None:
        if number == point[1]:
            world.before = world.after = lambda number: None
            act()

    setattr(world, point[2], once)


def test_whoever_is_killed_between_two_calls_is_done_again_by_another(point: tuple[str, int, str]) -> None:
    world = World()

    def die() -> None:
        raise Killed

    _at(world, point, die)
    with pytest.raises(Killed):
        requeuer(world).carry_out(PLANS[point[0]])
    done = requeuer(world).carry_out(PLANS[point[0]])
    check_done_once(world)
    assert done.next_job == ("100" if point[0] == "chain" else "")


def test_one_who_was_asleep_between_two_calls_does_it_no_second_time(point: tuple[str, int, str]) -> None:
    """An agent took over meanwhile, and the supervisor wakes up. (Two submissions within one call: `attempts`.)"""
    world = World()
    plan = PLANS[point[0]]
    _at(world, point, lambda: None if world.submitted else requeuer(world).carry_out(plan))
    requeuer(world).carry_out(plan)
    if len(world.submitted) == 2:
        assert point[0] == "chain"
        assert world.calls[point[1]] in ("submit", "dependents")
        return
    check_done_once(world)


def test_a_controller_that_loses_one_answer_gets_it_once(point: tuple[str, int, str]) -> None:
    world = World()

    def fail() -> None:
        raise UNAVAILABLE

    _at(world, point, fail)
    requeuer(world).carry_out(PLANS[point[0]])
    check_done_once(world)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_one_that_never_comes_back_is_given_up_in_the_end(plan: NextAttempt) -> None:
    world, clock = World(), FakeClock()
    world.refusals = dict.fromkeys(("job_state", "requeue", "dependents", "submit"), UNAVAILABLE)
    with pytest.raises(SlurmUnavailableError):
        requeuer(world, clock).carry_out(plan)
    assert CONTROLLER_PATIENCE - 10 < clock.now - 1000 <= CONTROLLER_PATIENCE + 60


@pytest.mark.parametrize("error", [RequeueDisabledError, SlurmPermissionError])
def test_a_refusal_falls_back_to_a_follow_on_job(error: type[SlurmError]) -> None:
    world = World()
    world.refusals["requeue"] = error(what="requeueing", why="no")
    plan = NextAttempt(script=SCRIPT)
    done = requeuer(world).carry_out(plan)
    assert (done.next_job, len(world.submitted)) == ("100", 1)
    for other in (NextAttempt(), NextAttempt(script=SCRIPT, falls_back=False)):
        with pytest.raises(error):
            requeuer(world).carry_out(other)
    assert len(world.submitted) == 1


def test_a_requeue_that_looked_like_a_failure_is_looked_up() -> None:
    """scontrol dies of the very SIGTERM that the requeue brings: whether it held is Slurm's to say."""
    died = SlurmError(what="requeueing job 7", why="it was killed", rc=-15)
    for held in (True, False):
        world = World()

        def die(number: int, world: World = world, held: bool = held) -> None:
            if world.calls[number] == "requeue":
                world.before = world.after = lambda number: None
                raise died

        setattr(world, "after" if held else "before", die)
        if held:
            requeuer(world).carry_out(NextAttempt(excluded=("n3",)))
            check_done_once(world)
        else:
            with pytest.raises(SlurmError, match="it was killed"):
                requeuer(world).carry_out(NextAttempt())


def test_a_sites_epilog_gets_its_time_and_the_sigterm_that_a_requeue_brings_is_ignored() -> None:
    """A begin time that passes before the old attempt is gone is set to Slurm's own delay again."""
    world = World()
    world.has_epilog = True
    requeuer(world).carry_out(NextAttempt())
    assert world.waived == GONE_WITH_EPILOG
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_refused_exclusion_still_begins() -> None:
    world = World()
    world.refusals["exclude_nodes"] = SlurmError(what="excluding", why="Invalid node name specified")
    done = requeuer(world).carry_out(NextAttempt(excluded=("n3",)))
    assert "not without n3: excluding: Invalid node name" in done.summary
    assert world.waived == GONE_SECONDS


def test_the_delay_that_can_not_be_waived_is_said() -> None:
    world = World()
    world.refusals["start_now"] = SlurmPermissionError(what="starting job 7 now", why="denied")
    words = requeuer(world).carry_out(NextAttempt()).summary
    assert words.startswith("job 7 is requeued; it begins after Slurm's own delay of about two minutes")
    assert "denied" in words


def test_what_is_done_is_said() -> None:
    soon = "and may begin when this attempt is gone"
    for plan, words in (
        (NextAttempt(), f"job 7 is requeued {soon}"),
        (NextAttempt(delay=60), "job 7 is requeued and may begin in 60 s"),
        (NextAttempt(excluded=("n2", "n3")), f"job 7 is requeued without n[2-3] {soon}"),
        (NextAttempt(excluded=()), f"job 7 is requeued {soon}"),
        (NextAttempt(way=RequeueWay.CHAIN, script=SCRIPT), "job 100 goes on when job 7 has ended, without n9"),
    ):
        world = World()
        world.excluded = ("n9",)
        assert requeuer(world).carry_out(plan).summary == words
        assert plan.way is RequeueWay.CHAIN or world.waived == max(plan.delay, GONE_SECONDS)
        assert world.excluded == (("n9",) if plan.excluded is None else plan.excluded)


@pytest.mark.parametrize("waits_already", [False, True])
def test_a_tasks_follow_on_job_is_named_as_slurms_commands_want_it(waits_already: bool) -> None:
    world = World()
    world.submitted += [()] if waits_already else []
    task = JobRequeuer(world, FakeClock(), job=JobId("70_1"), restart_count=0, array_task="1")  # type: ignore[arg-type]
    assert task.carry_out(NextAttempt(way=RequeueWay.CHAIN, script=SCRIPT)).next_job == "100_1"
    assert len(world.submitted) == 1


@pytest.mark.parametrize(
    ("plan", "has", "words"),
    [
        (None, ["--exclude=n[2-3]"], ", without n[2-3]"),
        (("n4",), ["--exclude=n4"], ", without n4"),
        ((), [], ""),
    ],
)
def test_a_follow_on_job_does_without_whom_its_job_does_without(
    plan: tuple[str, ...] | None, has: list[str], words: str
) -> None:
    """The job's own list came with its submission, and does not stand in the script."""
    world = World()
    world.excluded = ("n2", "n3")
    done = requeuer(world).carry_out(NextAttempt(way=RequeueWay.CHAIN, script=SCRIPT, excluded=plan))
    (submitted,) = world.submitted
    assert [word for word in submitted if word.startswith("--exclude")] == has
    assert done.summary == f"job 100 goes on when job 7 has ended{words}"


def test_sbatchs_arguments() -> None:
    assert list(follow_on_arguments(JOB, NextAttempt())) == ["--dependency=afterany:7", "--begin=now"]
    plan = NextAttempt(delay=60.0, excluded=("n3", "n4"))
    assert list(follow_on_arguments(JobId("70_1"), plan, array_task="1")) == [
        "--dependency=afterany:70_1",
        "--begin=now+60",
        "--array=1",
        "--exclude=n[3-4]",
    ]
    assert not any("exclude" in word for word in follow_on_arguments(JOB, NextAttempt(excluded=())))


@pytest.mark.parametrize(
    ("up", "excluded", "asked", "said"),
    [
        ("n1 n2 n3 n4", (), (4, 4), ""),
        ("n1 n3 n4", (), (3, 4), "with 3 to 4 nodes (n2 is drained or down)"),
        ("n1 n2 n3 n4", ("n2",), (3, 4), "with 3 to 4 nodes"),
        ("n1 n4", (), (3, 4), "with 3 to 4 nodes (n[2-3] are drained or down)"),
    ],
)
@pytest.mark.parametrize("way", [RequeueWay.REQUEUE, RequeueWay.CHAIN])
def test_a_spare_that_is_not_up_is_not_waited_for(
    way: RequeueWay, up: str, excluded: tuple[str, ...], asked: tuple[int, int], said: str
) -> None:
    world = World()
    world.up = frozenset(up.split())
    done = requeuer(world).carry_out(NextAttempt(way=way, script=SCRIPT, nodes=(3, 4), excluded=excluded or None))
    if way is RequeueWay.REQUEUE:
        assert world.num_nodes == asked
        assert world.calls.index("set_num_nodes") < world.calls.index("start_now")
        assert said in done.summary
    else:
        assert f"--nodes={asked[0]}-{asked[1]}" in world.submitted[0]


def test_where_the_nodes_can_not_be_asked_for_their_number_stays() -> None:
    world = World()
    world.refusals["partitions"] = UNAVAILABLE
    requeuer(world).carry_out(NextAttempt(nodes=(3, 4)))
    assert (world.num_nodes, world.phase) == (None, JobPhase.PENDING)
    world = World()
    requeuer(world).carry_out(NextAttempt(nodes=(3, 4), is_late=True))
    assert "partitions" not in world.calls

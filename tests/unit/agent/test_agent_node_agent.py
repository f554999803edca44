"""One agent's loop, fed with records, signals and workers' ends: what it starts, stops, says, and ends with."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.agent import ending, local_workers, node_agent, rounds
from hpc_elastic.agent.fork_server import ForkServer
from hpc_elastic.agent.hang_detector import HangDetector
from hpc_elastic.agent.heartbeat_watch import Hang
from hpc_elastic.agent.nccl_watch import NcclWatch
from hpc_elastic.agent.node_agent import NodeAgent
from hpc_elastic.agent.part import Condemned, GroupSite, Part
from hpc_elastic.agent.store_server import Guard, MasterPortTakenError, StoreServer, StoreState
from hpc_elastic.agent.supervision import Phase, WorkerState
from hpc_elastic.agent.worker_reports import PreemptionWatch
from hpc_elastic.failures.classify import moment_after
from hpc_elastic.failures.ranking import ALL_ALIKE, FailureClass
from hpc_elastic.failures.stacks import RankStacks
from hpc_elastic.rendezvous.membership import NodeInfo
from hpc_elastic.rendezvous.state import HangMark, Member, RoundRecord, RunNotice, Status
from hpc_elastic.rendezvous.succession import EndClaimed, EndUnclaimed
from hpc_elastic.run.control_events import RunClosed
from hpc_elastic.run.events import RunEvent
from hpc_elastic.run.paths import UNCONFIRMED_CODE, UNHEALTHY_CODE, Outcome
from hpc_elastic.run.progress import Activity, Doing, HangSettings, OnHang, RankSockets, Source
from hpc_elastic.store.file_store import StoreError
from hpc_elastic.workers.spawn import EnvironmentChange, WorkerStartError
from hpc_elastic.workers.stop import Survivor
from tests.rigs.agent_site import make_site
from tests.rigs.event_pairs import log_into
from tests.rigs.fake_clock import FakeClock
from tests.rigs.fake_workers import FakeWorkers, failure
from tests.rigs.specs import make_attempt, make_spec

ME = "00000-n0-0000000000000005-aaaa"
OTHER = "00001-n1-0000000000000001-bbbb"
BOTH = (Member(ME, 0, 2), Member(OTHER, 1, 1))
START = RoundRecord(number=1, epoch="e", term=1, leader=ME, round=0, status=Status.JOINABLE)


def joinable(round_index: int, **changes: Any) -> RoundRecord:
    return replace(START, round=round_index, members=BOTH, reason="why", **changes)


def frozen(round_index: int = 0, members: Sequence[Member] = BOTH, **changes: Any) -> RoundRecord:
    return replace(START, round=round_index, status=Status.FROZEN, members=tuple(members), **changes)


def final(round_index: int = 0, members: Sequence[Member] = BOTH, **changes: Any) -> RoundRecord:
    return replace(
        frozen(round_index, members),
        status=Status.FINAL,
        **{"master": "10.0.0.1 29500 1", "restarts_used": 0, **changes},
    )


RUNNING = ([frozen()], [final()])


def closed(outcome: Outcome = Outcome.SUCCEEDED) -> RoundRecord:
    return replace(START, status=Status.CLOSED, outcome=outcome, members=BOTH, reason="the end")


class Said:
    """Stands for the participant: what the agent asks of it, as (word, arguments)."""

    def __init__(self) -> None:
        self.words: list[tuple[str, tuple[Any, ...]]] = []

    @property
    def claims(self) -> Said:
        return self

    to_all = claims

    @property
    def ending(self) -> SimpleNamespace:
        return SimpleNamespace(begin=self.await_end)

    def __getattr__(self, word: str) -> Callable[..., None]:
        return lambda *arguments, **named: self.words.append((word, (*arguments, *named.values())))

    def all(self, *wanted: str) -> list[str]:
        # Every agent asks at the end of a run which process finishes it: left out where all words are wanted.
        return [word for word, _ in self.words if word in (wanted or {w for w, _ in self.words} - {"await_end"})]

    def last(self, wanted: str) -> tuple[Any, ...]:
        return [arguments for word, arguments in self.words if word == wanted][-1]


Step = Callable[[], Any] | list[Any] | Phase


CLAIMED, UNCLAIMED = EndClaimed(by="another"), EndUnclaimed()


class Script:
    """Stands for the coordination: each look of the agent's loop plays the next step of the test."""

    refusal = None

    def lasting_refusal(self) -> None:
        return None

    def __init__(self, said: Said, fd: int) -> None:
        self._said = said
        self._fd = fd
        self.steps: Iterator[Step] = iter(())
        self._idle_looks = 0
        self.last_words: list[Any] = []
        """What is there when the agent has ended its coordination."""
        self._is_stopped = False
        self.ends: list[RunEvent] = [CLAIMED]
        """What the agent hears when it asks which process finishes the closed attempt; the last one for ever."""

    def fileno(self) -> int:
        return self._fd

    def start(self) -> None:
        pass

    def stop(self, *, within: float) -> bool:
        self._is_stopped = True
        return True

    def ask(self, command: Callable[[Any], None]) -> None:
        command(self._said)

    def take(self) -> list[Any]:
        if self._is_stopped:
            return self.last_words
        step = next(self.steps, None)
        if step is None and self._said.all("await_end"):
            return [self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]]
        if step is None:
            self._idle_looks += 1
            assert self._idle_looks < 20, "the script is over, and the agent has not ended"
            return []
        found = step() if callable(step) else step
        return found if isinstance(found, list) else []


class Server(StoreServer):
    """Stands for the TCPStore's host."""

    state = StoreState.IDLE
    pid = None

    def __init__(self) -> None:
        self._is_reported = False
        self.calls: list[str] = []
        self.port = 29500
        self.failure = ""
        self.refusal: Exception | None = None
        self.guard: Guard | None = None

    def watched(self) -> tuple[int, ...]:
        return ()

    def bind(self, address: str, port: int | None, *, guarded: bool = False) -> tuple[str, int]:
        if self.refusal:
            raise self.refusal
        self.calls.append("bind")
        self.port += 1
        return address, port or self.port

    def on_setup(self, change: EnvironmentChange) -> None:
        pass

    def serve(self) -> None:
        self.calls.append("serve")

    def release(self) -> None:
        self.calls.append("release")

    def close(self) -> None:
        self.calls.append("close")

    def handle(self) -> StoreState:
        return self.state


@dataclass
class Play:
    """An agent, and everything around it."""

    agent: NodeAgent
    said: Said
    server: Server
    workers: list[FakeWorkers]
    signals: list[signal.Signals]
    events: list[tuple[str, dict[str, Any]]]
    script: Script

    def run(self, *steps: Step) -> int:
        self.script.steps = (partial(self._is_in, step) if isinstance(step, Phase) else step for step in steps)
        return self.agent.run()

    def made(self, steps: Sequence[Any]) -> list[Step]:
        """Steps of a table, where one may be a function of the play."""
        return [step(self) if isinstance(step, FunctionType) else step for step in steps]

    # -- steps

    def worker(self, then: Sequence[Any] = (), **facts: Any) -> Callable[[], list[Any]]:
        """The first workers show these facts; then come these records."""
        return lambda: [setattr(self.workers[0], *fact) for fact in facts.items()] and list(then)

    def fall(self, *failures: Any, **facts: Any) -> Step:
        return lambda: (self.worker(**facts)(), self.workers[0].fall(*failures))

    def finish(self) -> None:
        self.workers[0].finish()

    def shows(self, **facts: Any) -> Callable[[], None]:
        def check() -> None:
            assert {name: getattr(self.workers[0], name) for name in facts} == facts

        return check

    def signal(self, number: signal.Signals) -> Step:
        return lambda: self.signals.append(number)

    def wait(self, seconds: float) -> Callable[[], None]:
        def wait() -> None:
            self.agent.site.clock.now += seconds  # type: ignore[attr-defined]

        return wait

    def lose_store(self) -> None:
        self.server.state = StoreState.FAILED

    def _is_in(self, phase: Phase) -> None:
        assert self.agent.phase is phase

    def event(self, name: str) -> dict[str, Any]:
        return [fields for event, fields in self.events if event == name][-1]


MakePlay = Callable[..., Play]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Play]]:
    always_ready = os.eventfd(1)
    never_ready = os.eventfd(0)
    monkeypatch.setattr(node_agent, "reap_orphans", lambda known: [])

    def build(
        *,
        cluster: str = "slurm",
        kill_wait: float | None = None,
        start_error: Exception | None = None,
        parts: Sequence[Part] = (),
        watch: Any = None,
        hangs: HangSettings | None = None,
        **spec: Any,
    ) -> Play:
        said, server = Said(), Server()
        made: list[FakeWorkers] = []
        signals: list[signal.Signals] = []
        events: list[tuple[str, dict[str, Any]]] = []
        script = Script(said, always_ready)

        def make_workers(site: GroupSite, **kinds: Any) -> FakeWorkers:
            made.append(FakeWorkers(site.round, site.layout, kinds["excluding"], start_error))
            return made[-1]

        monkeypatch.setattr(local_workers, "LocalWorkers", make_workers)
        monkeypatch.setattr(rounds, "torch_available", lambda python: True)

        def take() -> list[signal.Signals]:
            taken = list(signals)
            signals.clear()
            return taken

        site = make_site(
            spec=make_spec(**spec, hangs=hangs or HangSettings()),
            attempt=make_attempt(cluster=cluster, nodes=("n0", "n1"), batch_host="n0", kill_wait=kill_wait),
            info=NodeInfo(uid=ME, node=0, host="n0", local_world_size=2, addresses=("10.0.0.1",), port=1),
            environ={"PATH": "/bin"},
            coordination=script,
            store_server=server,
            events=log_into(events),
            **({"watch": watch} if watch is not None else {}),
        )
        if hangs is not None:
            nccl = NcclWatch("", run_uid="", least=hangs.least, clock=site.clock)
            found = HangDetector(site, nccl=nccl, gpus=None, environment={})
            parts = [*parts, found]
        preemption = PreemptionWatch(site)
        agent = NodeAgent(
            site,
            [*parts, preemption, server],
            signals=SimpleNamespace(
                fileno=lambda: never_ready, take=take, sender=lambda number: "", holds=lambda numbers: False
            ),  # type: ignore[arg-type]
            guardian_pid=77,
        )
        return Play(agent, said, server, made, signals, events, script)

    yield build
    os.close(always_ready)
    os.close(never_ready)


def test_a_run_that_succeeds(play: MakePlay) -> None:
    p = play()
    assert p.agent.state is WorkerState.INIT
    begins = [[START], Phase.JOINING, [frozen()], Phase.READY, [final()], Phase.RUNNING]
    assert p.run(*begins, p.finish, Phase.DONE, [], [closed()]) == 0
    assert p.agent.state is WorkerState.SUCCEEDED
    assert p.said.all() == ["join", "confirm", "report_done", "deregister"]
    assert p.said.last("confirm") == (0, "10.0.0.1 29501 1")
    assert p.said.last("report_done") == (0,)
    (workers,) = p.workers
    assert [env["RANK"] for env in workers.environments] == ["0", "1"]
    assert workers.environments[0]["WORLD_SIZE"] == "3"
    assert workers.environments[0]["MASTER_PORT"] == "29500"
    assert p.server.calls[:2] == ["bind", "serve"]
    assert p.server.calls[-1] == "close"


def test_what_was_decided_while_it_left_is_told_too(play: MakePlay) -> None:
    p = play()
    p.script.last_words = [RunClosed(round=0, outcome="failed", reason="SIGINT on n0"), closed()]
    p.signals.append(signal.SIGINT)
    assert p.run([START]) == 128 + signal.SIGINT
    assert p.event("closed")["reason"] == "SIGINT on n0"


def test_who_is_not_the_first_confirms_without_a_port(play: MakePlay) -> None:
    p = play()
    members = (Member(OTHER, 1, 1), Member(ME, 0, 2))
    p.run([frozen(members=members)], [final(members=members)], [closed()])
    assert p.said.last("confirm") == (0, "")
    assert "bind" not in p.server.calls
    assert "serve" not in p.server.calls
    assert [env["RANK"] for env in p.workers[0].environments] == ["1", "2"]


class ColdServer(ForkServer):
    """Imports until it is warm; its messages come first."""

    holds_start = True
    due = None

    def __init__(self) -> None:
        self._fd = os.eventfd(0)

    on_setup = handle = close = lambda self, *_: None

    def watched(self) -> tuple[int, ...]:
        return (self._fd,)


def test_a_cold_agent_waits_for_a_late_record_before_it_asks_to_join(
    play: MakePlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would end a round that goes on, for workers that then wait for the import."""
    p = play(parts=[ColdServer()])
    ready = iter([{-1}, {-1}, {p.script.fileno()}])
    monkeypatch.setattr(node_agent, "wait_readable", lambda watched, seconds: next(ready, set()))
    others = final(members=(Member(OTHER, 1, 1),))
    assert p.run([], [], [others], Phase.JOINING, [closed()]) == 0
    assert p.said.all("join") == []


def ended_by_agent(p: Play) -> Step:
    return p.worker([joinable(1)], failures=[failure(stopped_by_agent=True)])


OLDER = Member("00000-n0-0000000000000004-cccc", 0, 2)


@pytest.mark.parametrize(
    ("steps", "said", "started", "stops"),
    [
        pytest.param(
            [[frozen()], [frozen(term=2, leader=OTHER)], Phase.READY, [final(term=2)], [final(term=3)], Phase.RUNNING],
            "join confirm0",
            [0],
            1,
            id="a second bind would give the workers' TCPStore a port that nobody knows",
        ),
        pytest.param(
            [
                *([frozen(0)], [joinable(1)], Phase.JOINING),
                *([frozen(1)], [frozen(2)], Phase.READY, [final(2)], Phase.RUNNING),
            ],
            "join confirm0 join confirm1 join confirm2",
            [2],
            1,
            id="a round given up before it was final, and one not seen",
        ),
        pytest.param(
            [[frozen(members=BOTH[1:])], [final(members=BOTH[1:])], Phase.JOINING],
            "join",
            [],
            0,
            id="a final round without this node",
        ),
        pytest.param([[final(members=(OLDER, BOTH[1]))], Phase.JOINING], "join", [], 0, id="with its older agent"),
        pytest.param(
            [*RUNNING, ended_by_agent, [], [], Phase.JOINING],
            "join confirm0 join",
            [0],
            1,
            id="others broke the round: no report of workers that this agent ended",
        ),
        pytest.param(
            [
                *(*RUNNING, lambda p: p.finish, [], [], Phase.DONE),
                *([joinable(1)], [], [], [], Phase.JOINING, [frozen(1)], [final(1)], Phase.RUNNING),
            ],
            "join confirm0 report_done join confirm1",
            [0, 1],
            1,
            id="a later failure breaks a round whose workers are done here",
        ),
        pytest.param(
            [*RUNNING, lambda p: p.worker([joinable(1)], looks_to_stop=5), [joinable(2)], [joinable(3)], *[[]] * 5],
            "join confirm0 join",
            [0],
            1,
            id="more rounds while workers end",
        ),
    ],
)
def test_the_records_decide_what_is_said_started_and_stopped(
    play: MakePlay, steps: list[Any], said: str, started: list[int], stops: int
) -> None:
    p = play()
    p.run(*p.made(steps), [closed()])
    words = [word + str(*args[:1]) * (word == "confirm") for word, args in p.said.words if word != "await_end"]
    assert words == [*said.split(), "deregister"]
    assert p.server.calls.count("bind") == said.count("confirm")
    assert [workers.round for workers in p.workers] == started
    assert [event for event, _ in p.events].count("workers_stopping") == stops


def test_a_failure_is_told_at_once_and_summed_up_before_the_next_join(play: MakePlay) -> None:
    p = play()

    def told_at_once() -> list[Any]:
        assert p.said.all()[-1] == "report_failure"
        assert p.workers[0].stopping
        return [joinable(1)]

    fails = p.fall(failure(1), failure(0, stopped_by_agent=True))
    again = [Phase.JOINING, [frozen(1)], [final(1, restarts_used=1)], [closed(Outcome.FAILED)]]
    assert p.run(*RUNNING, fails, [], told_at_once, [], *again) == 1
    assert p.agent.state is WorkerState.FAILED
    assert p.said.all() == ["join", "confirm", "report_failure", "sum_up_failures", "join", "confirm", "deregister"]
    index, first = p.said.last("report_failure")
    assert (index, first.failure_class, first.message) == (0, "unknown", "rank 0 ended with exit code 1")
    assert first.retryable
    index, summed = p.said.last("sum_up_failures")
    assert (index, summed.message, summed.seconds) == (0, "rank 1: boom", 12.0)
    assert [fields["rank"] for event, fields in p.events if event == "worker_failed"] == [1, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_under_slurm_the_supervisor_is_asked_what_a_signal_means(play: MakePlay, number: signal.Signals) -> None:
    """A SIGTERM may be the beginning of a preemption's grace time: the workers run on, and may save."""
    p = play(kill_wait=30.0)
    code = p.run(
        *RUNNING,
        p.signal(number),
        p.signal(number),
        Phase.RUNNING,
        [final(heard=f"{number.name} on n0", number=2)],
        p.wait(3.9),
        Phase.RUNNING,
        [final(notice=RunNotice("SIGTERM on n0 (preemption)", 20.0, left=60.0), number=3)],
        p.wait(10.0),
        p.signal(number),  # the end of the grace, say
        Phase.RUNNING,
        [closed(Outcome.PREEMPTED)],
    )
    assert [args for word, args in p.said.words if word == "heard"] == [(f"{number.name} on n0",)]
    assert p.said.all("close", "give_notice") == []
    assert code == (0 if number is signal.SIGUSR2 else 143)
    assert p.workers[0].graces == [pytest.approx(30.0 if number is signal.SIGUSR2 else 24.0)]


def test_a_preemption_that_begins_after_a_notice_is_asked_about_and_leaves_less_time(play: MakePlay) -> None:
    p = play(kill_wait=30.0, shutdown_timeout=30.0)
    long, short = (
        RunNotice("SIGUSR2 on n1", 85.0, left=120.0),
        RunNotice("SIGTERM on n0 (preemption)", 6.0, left=10.0),
    )
    p.run(
        [frozen()],
        [final(notice=long)],
        p.wait(20.0),
        p.signal(signal.SIGTERM),
        p.wait(5.0),
        Phase.RUNNING,  # nobody has to answer: it may be what was known
        [final(notice=short, number=3)],
        [final(notice=replace(short, step=7), number=4)],
        p.signal(signal.SIGTERM),  # its end
        p.wait(5.0),
        [closed(Outcome.PREEMPTED)],
    )
    assert [args for word, args in p.said.words if word == "heard"] == [("SIGTERM on n0",)]
    assert p.workers[0].graces == [pytest.approx(10 - 5 - 2)]


def test_nobody_says_what_a_sigterm_means(play: MakePlay) -> None:
    p = play(kill_wait=30.0)
    code = p.run(*RUNNING, p.signal(signal.SIGTERM), p.wait(3.9), Phase.RUNNING, p.wait(0.2), Phase.LEAVING)
    assert code == 128 + signal.SIGTERM
    assert p.said.last("close") == (Outcome.CANCELLED, "SIGTERM on n0")
    assert p.workers[0].graces == [pytest.approx(30 - 4.1 - 6)], "what is left of Slurm's KillWait"
    assert p.said.all("await_end") != [], "the supervisor may have been killed: then an agent writes the verdict"


@pytest.mark.parametrize(("cluster", "asked"), [("local", 0.0), ("slurm", 4.1)])
def test_a_notice_is_told_to_all_and_ends_nothing_by_itself(play: MakePlay, cluster: str, asked: float) -> None:
    """Under Slurm where no supervisor says what it means."""
    p = play(cluster=cluster)
    code = p.run(
        *RUNNING, p.signal(signal.SIGUSR2), p.wait(asked), Phase.RUNNING, Phase.RUNNING, [closed(Outcome.PREEMPTED)]
    )
    (notice,) = p.said.last("give_notice")
    assert notice.reason == "SIGUSR2 on n0"
    assert not notice.is_agreed
    assert 0 < notice.seconds < 120
    assert p.said.all("close") == []
    assert code == 0, "it did what it was asked to do"


CANCELLED = closed(Outcome.CANCELLED)


def sigterm(p: Play) -> Step:
    return p.signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("kill_wait", "steps", "graces"),
    [
        pytest.param(None, [sigterm, [CANCELLED]], [30.0], id="the run's own"),
        pytest.param(10.0, [sigterm, [CANCELLED]], [8.0], id="what KillWait leaves"),
        pytest.param(10.0, [[CANCELLED]], [30.0], id="no signal of Slurm's: KillWait has not begun"),
        pytest.param(1.0, [sigterm, [CANCELLED]], [0.5], id="a short KillWait"),
        pytest.param(100.0, [sigterm, [CANCELLED]], [30.0], id="a long KillWait"),
        pytest.param(
            10.0,
            [lambda p: p.worker(looks_to_stop=4), [closed(Outcome.FAILED)], sigterm],
            [30.0, 8.0],
            id="a cancel while they are stopped",
        ),
    ],
)
def test_the_grace_is_never_more_than_slurm_or_a_notice_leaves(
    play: MakePlay, kill_wait: float | None, steps: list[Any], graces: list[float]
) -> None:
    p = play(kill_wait=kill_wait)
    p.run(*RUNNING, *p.made(steps))
    assert p.workers[0].graces == graces


@pytest.mark.parametrize("is_over", [False, True])
def test_workers_whose_round_went_on_without_them_are_killed_at_once(play: MakePlay, is_over: bool) -> None:
    p = play(watch=(watch := Watch(FakeClock())), hangs=HangSettings())
    watch.is_round_over, watch.due = is_over, None
    p.run(*RUNNING, [joinable(2)], [closed()])
    assert p.workers[0].graces[0] == (-1.0 if is_over else 30.0)


NEWER = Member("00000-n0-0000000000000006-cccc", 0, 2)


@pytest.mark.parametrize(
    ("heard", "reason"),
    [
        (StoreError(root="/s", why="no space"), "no space"),
        (frozen(1, (NEWER,)), "a newer agent runs on this node"),
    ],
)
def test_a_store_that_can_not_be_used_or_a_newer_agent_ends_this_one(play: MakePlay, heard: Any, reason: str) -> None:
    p = play()
    assert p.run(*RUNNING, [heard]) == 1
    assert p.workers[0].graces, "and its workers first"
    assert reason in p.event("agent_ended")["reason"]
    assert "close" not in p.said.all()


def test_a_master_port_that_is_taken_ends_the_run_with_its_reason(play: MakePlay) -> None:
    p = play(master_port=29500)
    p.server.refusal = MasterPortTakenError(address="n0", port=29500, reason="in use")
    p.run([frozen()], Phase.READY, [closed(Outcome.FAILED)])
    outcome, reason = p.said.last("close")
    assert outcome is Outcome.FAILED
    assert "29500" in reason
    assert "confirm" not in p.said.all()


@pytest.mark.parametrize(
    "error",
    [
        WorkerStartError(command="python3", cwd="/", errno=errno.EAGAIN, reason="no more processes"),
        OSError(errno.EIO, "Input/output error"),
    ],
)
def test_workers_that_can_not_be_started_are_a_failure_with_evidence(play: MakePlay, error: Exception) -> None:
    p = play(start_error=error)
    p.run(*RUNNING, [], [], Phase.JOINING, [closed(Outcome.FAILED)])
    assert p.said.all() == ["join", "confirm", "report_failure", "sum_up_failures", "join", "deregister"]
    assert p.said.last("sum_up_failures")[1].retryable
    assert "serve" not in p.server.calls


def test_a_node_that_lacks_what_workers_run_leaves_and_the_supervisor_judges_by_how_many_do(play: MakePlay) -> None:
    p = play(start_error=WorkerStartError(command="python9", cwd="/", errno=errno.ENOENT, reason="no such file"))
    assert p.run(*RUNNING, [], []) == 2
    assert p.said.all() == ["join", "confirm", "deregister"]
    assert p.agent._unfit.reason == "cannot start 'python9': no such file"


@pytest.mark.parametrize("is_felt_first", [False, True])
def test_a_lost_store_of_the_workers_is_told_as_the_machines_failure(play: MakePlay, is_felt_first: bool) -> None:
    """Also where a worker felt it first, and the workers are being stopped."""
    p = play()
    p.server.failure = "the process ended"
    felt = [p.worker(failed=True, news=True, looks_to_stop=4), [], Phase.STOPPING] * is_felt_first
    p.run(*RUNNING, *felt, p.lose_store, *[[]] * 4, Phase.JOINING, [closed(Outcome.FAILED)])
    reason = "the workers' TCPStore is gone: the process ended"
    assert [fields for event, fields in p.events if event == "platform_failure"] == [{"round": 0, "reason": reason}]
    if not is_felt_first:
        _, summed = p.said.last("sum_up_failures")
        assert (summed.failure_class, summed.fingerprint, summed.message) == ("infrastructure", "", reason)


def test_a_process_that_nothing_ends_is_not_waited_for_again(play: MakePlay) -> None:
    p = play()
    stuck = p.worker([joinable(1)], left=(Survivor(pid=99, name="python", state="D", why="in the kernel"),))
    p.run(*RUNNING, stuck, [], [], [frozen(1)], [final(1)], [closed()])
    assert p.workers[0].excluded[0] == {77}
    assert p.workers[1].excluded[0] == {77, 99}


@pytest.mark.parametrize(
    ("heard", "codes", "tries"),
    [
        ([CLAIMED], [], []),
        ([UNCLAIMED], [0], [True]),
        ([UNCLAIMED], [None], [True]),
        ([UNCLAIMED, CLAIMED], [UNCONFIRMED_CODE], [True]),
        ([UNCLAIMED, UNCLAIMED], [UNCONFIRMED_CODE, 0], [True, False]),
    ],
)
def test_the_end_is_this_agents_where_no_process_has_claimed_it(
    play: MakePlay,
    monkeypatch: pytest.MonkeyPatch,
    heard: list[RunEvent],
    codes: list[int | None],
    tries: list[bool],
) -> None:
    tried: list[bool] = []

    def finish(run_dir: str, attempt: int, uid: str, environ: object, confirmed: bool) -> int | None:
        tried.append(confirmed)
        return codes[len(tried) - 1]

    monkeypatch.setattr(ending, "finish_attempt", finish)
    p = play()
    p.script.ends = heard
    p.run([START], [replace(START, number=9, status=Status.CLOSED, outcome=Outcome.FAILED, reason="x")])
    assert tried == tries


@pytest.mark.parametrize(
    ("signals", "outcome", "asks"),
    [
        pytest.param([], Outcome.SUPERSEDED, False, id="the attempt that supersedes it finishes it"),
        # ``scancel --batch`` kills the supervisor at once, and the agents after KillWait.
        pytest.param([signal.SIGTERM], Outcome.CANCELLED, True, id="Slurm ends it: does the supervisor live?"),
    ],
)
def test_an_agent_asks_which_process_finishes_the_attempt(
    play: MakePlay, signals: list[signal.Signals], outcome: Outcome, asks: bool
) -> None:
    p = play()
    p.signals += signals
    p.run([START], [closed(outcome)])
    assert bool(p.said.all("await_end")) is asks


# -- hangs


class Watch:
    """Stands for `HeartbeatWatch`: finds that a worker hangs when a test says so."""

    def __init__(self, clock: FakeClock) -> None:
        self.due: float | None = clock.monotonic()
        self.verdict: Any = None
        self.mark: HangMark | None = None
        self.declared: HangMark | None = None
        self.furthest_step = 12
        self.is_round_over = False
        self.calls: list[Any] = []
        self.hung: dict[int, str] = {}
        self.progress = lambda: None

    def look(self, running: Sequence[int]) -> Any:
        found, self.verdict = self.verdict, None
        return found

    def refresh(self) -> list[Any]:
        return []

    def on_hang(self, mark: HangMark, running: Sequence[int]) -> None:
        self.calls.append(("on_hang", mark, list(running)))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: self.calls.append(name)


class Scale(Part):
    """A new reason to end workers: a part, and nothing else."""

    found: Condemned | None = None

    def environment(self, given: Mapping[str, str]) -> Mapping[str, str]:
        return {"SCALE": given["PATH"]}

    def look(self, agent: NodeAgent) -> Condemned | None:
        found, self.found = self.found, None
        return found


def test_a_part_ends_a_worker_as_a_failure_and_adds_to_its_environment(play: MakePlay) -> None:
    scale = Scale()
    p = play(parts=[scale])
    condemned = Condemned(reason="rank 1: too heavy", failure_class=FailureClass.ROOT, ranks={1: "too heavy"})
    told = p.shows(condemned=[condemned], stopping=True)
    p.run(*RUNNING, partial(setattr, scale, "found", condemned), told, [closed(Outcome.FAILED)])
    assert p.said.last("report_failure")[1].message == "rank 1: too heavy"
    assert p.workers[0].environments[0]["SCALE"] == "/bin"


def test_a_hang_is_a_failure_that_has_the_stacks_taken_first(play: MakePlay) -> None:
    p = play(watch=(watch := Watch(FakeClock())), hangs=HangSettings())

    def hang() -> None:
        watch.verdict = Hang(source=Source.HEARTBEAT, reason="rank 1 hangs: no heartbeat for 60.0 s", seconds=60.0)
        watch.mark = HangMark(7, 60.0)

    def told() -> list[Any]:
        assert p.workers[0].stopping
        assert p.workers[0].took_stacks, "asked for before they are ended"
        _, first = p.said.last("report_failure")
        assert (first.failure_class, first.step, first.hang) == ("hang", 12, HangMark(7, 60.0))
        assert first.message == "rank 1 hangs: no heartbeat for 60.0 s"
        p.workers[0].failures = [failure(1, failure_class=FailureClass.HANG, fingerprint="hang:1")]
        p.workers[0].stacks = {
            0: RankStacks(main=("a.py:1 f",), others=(("loader", ("b.py:2 g",)),)),
            1: RankStacks(where="D (disk sleep) in wait"),
        }
        return [joinable(1, hang=HangMark(7, 60.0))]

    p.run(*RUNNING, hang, told, [], [], [closed(Outcome.FAILED)])
    assert p.event("hang")["limit"] == 60.0
    _, summed = p.said.last("sum_up_failures")
    assert (summed.failure_class, summed.fingerprint, summed.step, summed.hang) == (
        "hang",
        "hang:1",
        12,
        HangMark(7, 60.0),
    )
    stacks = p.event("stacks_taken")
    assert stacks["groups"] == [{"ranks": [0], "stack": ["a.py:1 f"]}]
    assert stacks["threads"] == [{"ranks": [0], "name": "loader", "stack": ["b.py:2 g"]}]
    assert stacks["silent"] == [1]
    assert stacks["states"] == [{"rank": 1, "state": "D (disk sleep) in wait"}]
    assert "close" in watch.calls


def of_kernel(**changes: Any) -> Hang:
    return replace(Hang(source=Source.KERNEL, reason="no rank of 4 …", ranks=(3,), seconds=300.0), **changes)


def test_a_hang_that_is_observed_ends_nothing(play: MakePlay) -> None:
    p = play(watch=(watch := Watch(FakeClock())), hangs=HangSettings())
    hang = partial(setattr, watch, "verdict", of_kernel())
    p.run(*RUNNING, hang, p.shows(stopping=False), [closed(Outcome.FAILED)])
    assert p.event("hang_suspected")["ranks"] == [3]


@pytest.mark.parametrize("is_done", [False, True])
def test_a_hang_of_another_nodes_rank_is_declared_and_charged_to_none_here(play: MakePlay, is_done: bool) -> None:
    """Also by a node whose own workers have all ended with 0."""
    p = play(hangs=HangSettings(action=OnHang.ACT), watch=(watch := Watch(FakeClock())))

    def finish() -> list[Any]:
        if is_done:
            p.workers[0].finish()
        return []

    def hang() -> None:
        watch.verdict = of_kernel()
        watch.mark = watch.declared = HangMark(-1, 300.0, (3,))

    def told() -> list[Any]:
        _, first = p.said.last("report_failure")
        assert (first.failure_class, first.hang) == ("hang", HangMark(-1, 300.0, (3,)))
        return [joinable(1, hang=HangMark(-1, 300.0, (3,)))]

    p.run(*RUNNING, finish, hang, told, [], [], [closed(Outcome.FAILED)])
    _, summed = p.said.last("sum_up_failures")
    assert (summed.failure_class, summed.hang) == ("symptom", None)


@pytest.mark.parametrize(
    ("breaks", "took_stacks", "wants_look"),
    [
        pytest.param(joinable(1), False, False, id="a failure elsewhere"),
        pytest.param(joinable(1, symptoms=True), False, True, id="a symptom elsewhere gives the workers a moment"),
        pytest.param(joinable(1, hang=HangMark(7, 60.0)), True, False, id="a hang elsewhere has the stacks taken"),
        pytest.param(joinable(2, hang=HangMark(7, 60.0)), False, False, id="a hang of another round does not"),
    ],
)
def test_what_broke_the_round_elsewhere_decides_what_is_looked_at_here(
    play: MakePlay, breaks: RoundRecord, took_stacks: bool, wants_look: bool
) -> None:
    p = play(watch=(watch := Watch(FakeClock())), hangs=HangSettings())
    stopping = p.shows(stopping=True, took_stacks=took_stacks, wants_look=wants_look)
    p.run(*RUNNING, [breaks], stopping, [], [], [closed(Outcome.FAILED)])
    marked = [call for call in watch.calls if isinstance(call, tuple)]
    assert marked == [("on_hang", breaks.hang, [0, 1])] * took_stacks
    assert [name for name, _ in p.events if name == "stacks_taken"] == ["stacks_taken"] * took_stacks


SYMPTOM = failure(failure_class=FailureClass.SYMPTOM)


def test_where_only_a_symptom_is_known_the_workers_get_a_moment_on_all_nodes(play: MakePlay) -> None:
    p = play()

    def reported() -> list[Any]:
        p.shows(stopping=True, wants_look=True, moment_ended=False)()
        _, first = p.said.last("report_failure")
        assert first.failure_class == "symptom"
        p.workers[0].activities = [Activity(rank=0, doing=Doing.COLLECTIVE, call="all_reduce", failed=True)]
        p.workers[0].looks_to_stop = 3
        return [joinable(1, symptoms=True)]

    goes_on = p.shows(moment_ended=False)
    p.run(*RUNNING, p.fall(SYMPTOM, has_symptoms_only=True), reported, goes_on, *[[]] * 3, [closed(Outcome.FAILED)])
    (rank,) = p.event("ranks_observed")["ranks"]
    assert (rank["doing"], rank["call"], rank["failed"]) == ("collective", "all_reduce", True)


def test_a_cause_that_is_known_elsewhere_ends_the_moment(play: MakePlay) -> None:
    p = play()
    fails = p.fall(SYMPTOM, has_symptoms_only=True, looks_to_stop=5)
    p.run(*RUNNING, fails, [joinable(1)], p.shows(moment_ended=True), *[[]] * 5, [closed(Outcome.FAILED)])


@pytest.mark.parametrize("symptoms", [False, True])
def test_a_node_whose_workers_have_ended_gives_their_sockets_where_others_have_symptoms(
    play: MakePlay, symptoms: bool
) -> None:
    p = play()

    def ends() -> None:
        p.workers[0].sockets.ranks = (RankSockets(rank=0, ends=(("10.0.0.7", "4711"),)),)
        p.workers[0].sockets.network = "n"
        p.workers[0].finish()

    p.run(*RUNNING, ends, [], [], [joinable(1, symptoms=symptoms)], [], [closed(Outcome.FAILED)])
    seen = [(fields["network"], fields["sockets"]) for name, fields in p.events if name == "ranks_observed"]
    assert seen == [("n", [{"rank": 0, "ends": [["10.0.0.7", "4711"]]}])] * symptoms


LACKS = failure(
    exception_type="ModuleNotFoundError", message="ModuleNotFoundError: No module named 'x'", retryable=False
)


@pytest.mark.parametrize("breaks_elsewhere", [False, True])
def test_what_may_be_missing_on_this_node_alone_is_reported_after_a_moment_for_the_others(
    play: MakePlay, breaks_elsewhere: bool
) -> None:
    """A round that breaks elsewhere ends the moment."""
    p = play()

    def waits() -> list[RoundRecord]:
        p.shows(waits=True, stopping=False)()
        assert not p.said.all("report_failure")
        if not breaks_elsewhere:
            p.wait(moment_after(p.workers[0].seconds))()
        return [joinable(1)] * breaks_elsewhere

    def ends() -> None:
        p.shows(stopping=True)()
        assert bool(p.said.all("report_failure")) is not breaks_elsewhere

    p.run(*RUNNING, p.fall(LACKS, early=LACKS), waits, ends, [], [], [closed(Outcome.FAILED)])


def test_an_agent_leaves_whose_node_is_in_no_further_round(play: MakePlay) -> None:
    p = play()
    members = (Member(OTHER, 1, 1),)
    p.said.record = None
    code = p.run(*RUNNING, [joinable(1)], [], [frozen(1, members, unfit=(0,))], [], [])
    assert code == UNHEALTHY_CODE
    assert p.event("agent_ended")["reason"] == ALL_ALIKE


def test_the_port_is_opened_to_the_members_before_it_is_told(play: MakePlay) -> None:
    p = play()
    admitted: list[Any] = []
    p.server.guard = SimpleNamespace(admit=admitted.append)  # type: ignore[assignment]
    addresses = frozenset({"10.0.0.1", "10.0.0.2"})
    p.said.peers = SimpleNamespace(all_addresses=lambda uids: addresses if list(uids) == [ME, OTHER] else None)  # type: ignore[attr-defined]
    p.run([frozen()], lambda: admitted or [], [final()], [closed()])
    assert admitted == [addresses]
    assert p.said.last("confirm") == (0, "10.0.0.1 29501 1")


@pytest.mark.parametrize(("given", "expected"), [(None, "127.0.0.1"), ("10.0.0.7", "10.0.0.7")])
def test_a_round_of_one_node_meets_on_the_loopback(play: MakePlay, given: str | None, expected: str) -> None:
    p = play(master_addr=given)
    alone = (Member(ME, 0, 2),)
    p.run([frozen(members=alone)], [final(members=alone)], [closed()])
    assert p.said.last("confirm") == (0, f"{expected} 29501 1")

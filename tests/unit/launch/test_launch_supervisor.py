"""The supervisor's loop: who finishes the attempt, signals, the store, and how a run ends."""

from __future__ import annotations

import re
import signal

import pytest

from hpc_elastic.launch import supervisor as module
from hpc_elastic.launch.agents import NEWS_SECONDS, RELAUNCHES_PER_NODE, SETTLE_SECONDS, AgentEnd
from hpc_elastic.launch.site import LOOK_SECONDS, Allocation, JobCondition, JobWatch, SlurmAnswer
from hpc_elastic.launch.supervisor import AT_ONCE, END_RESERVE, LAUNCH_NEWS_SECONDS, SILENT_SECONDS
from hpc_elastic.rendezvous.proposals import to_event
from hpc_elastic.rendezvous.state import FailureMemory, RoundEvent, Status
from hpc_elastic.rendezvous.succession import END_UNCONFIRMED, claim_end, close_run
from hpc_elastic.run.paths import STORE_LOST_CODE, UNHEALTHY_CODE, Outcome
from hpc_elastic.store.file_store import StoreError, StoreWipedError
from tests.rigs.supervisor_stage import TICK, Stage

# -- who finishes the attempt


def test_where_no_other_process_finishes_the_attempt_it_is_finished_here(s: Stage) -> None:
    s.allocation = Allocation.UNKNOWN
    result = s.run(3.0, s.done, s.at(lambda: None))
    assert result.outcome is Outcome.SUCCEEDED
    assert not s.supervisor.superseded
    assert END_UNCONFIRMED <= s.since <= END_UNCONFIRMED + 5
    assert not claim_end(s.world.store, "another")


def test_slurm_is_asked_again_and_a_confirmation_that_comes_later_counts(s: Stage) -> None:
    s.allocation = Allocation.UNKNOWN
    answer = s.at(lambda: setattr(s, "allocation", Allocation.HELD))
    assert s.run(3.0, s.done, 2.0, answer).outcome is Outcome.SUCCEEDED
    assert not s.supervisor.superseded
    assert s.since < END_UNCONFIRMED / 2


def test_where_slurms_signal_has_come_slurm_is_not_asked(s: Stage) -> None:
    """It reaches this node, and its SIGKILL is near."""
    s.allocation = Allocation.UNKNOWN
    s.answer = SlurmAnswer(JobCondition.ENDED)
    s.run(3.0, s.done, 2.0, s.at(s.sent(signal.SIGTERM)))
    assert not s.supervisor.superseded
    assert s.since < 5
    assert not claim_end(s.world.store, "another")


def test_a_superseded_attempt_ends_and_finishes_nothing(s: Stage) -> None:
    s.run(3.0, lambda: close_run(s.world.store, "unit", Outcome.SUPERSEDED, "superseded by attempt 1 on n7"))
    assert s.supervisor.superseded
    assert claim_end(s.world.store, "another"), "it claims nothing"


# -- nodes that are lost to the run and not to Slurm


def test_a_lost_node_of_which_nobody_hears_is_tried_until_it_is_back(s: Stage) -> None:
    s.agents.hears_all_ends = False
    power_on = s.at(s.agents.powerless.clear)
    result = s.run(3.0, lambda: s.agents.cut_power(2), 40.0, power_on, 60.0, s.done)
    assert result.outcome is Outcome.SUCCEEDED
    tries = [at for node, at in s.agents.relaunched if node == 2]
    assert len(tries) == len(s.agents.relaunched) >= 3
    back_at = s.noted
    assert [at > back_at for at in tries] == [False] * (len(tries) - 1) + [True], "and not again once it is there"
    assert {member.node for member in s.newest().members} == {0, 1, 2}
    assert {fields["node"] for fields in s.names("agent_ended")} == {0, 1, 2}
    assert all(fields["detail"] != "launch failed" for fields in s.names("agent_ended"))


def test_a_node_that_slurm_has_given_up_is_not_tried_any_more(s: Stage) -> None:
    s.agents.hears_all_ends = False
    tries: list[int] = []

    def give_up() -> None:
        s.agents.give_up(2)
        tries.append(len(s.agents.relaunched))

    assert s.run(3.0, lambda: s.agents.cut_power(2), 40.0, give_up, 600.0, s.done).outcome is Outcome.SUCCEEDED
    assert len(s.agents.relaunched) == tries[0] > 1


def test_where_every_end_is_heard_of_nothing_is_tried(s: Stage) -> None:
    assert s.run(3.0, lambda: s.agents.cut_power(2), 60.0, s.done).outcome is Outcome.SUCCEEDED
    assert s.agents.relaunched == []


# -- how a run ends


def test_success(s: Stage) -> None:
    result = s.run(3.0, s.sent(signal.SIGCHLD), 1.0, s.done)
    assert (result.outcome, result.reason) == (Outcome.SUCCEEDED, "all workers ended with 0")
    assert result.signal_number is None
    assert s.names("notice") == [], "the end of a child is none"
    assert s.agents.relaunched == [], "an agent that ends with the run is not started again"
    assert len(s.agents.ends) == 1, "and nothing is left behind"
    assert s.look.stopped
    assert {fields["node"] for fields in s.names("agent_ended")} == {0, 1, 2}


@pytest.mark.parametrize(
    ("outcome", "fingerprint"), [(Outcome.FAILED, "F"), (Outcome.PREEMPTED, ""), (Outcome.TOO_FEW_NODES, "")]
)
def test_what_the_record_says_is_handed_on(s: Stage, outcome: Outcome, fingerprint: str) -> None:
    """A failure that the run had got over is not what a preemption ended it by."""
    memory = FailureMemory(fingerprint="F", times=2, step=70)

    def close() -> None:
        agent = s.agents.of[0].participant
        record = agent.record
        assert record is not None
        closed = record.successor(status=Status.CLOSED, outcome=outcome, reason="why", retryable=False, memory=memory)
        agent._append(closed, to_event(RoundEvent.CLOSE, closed, "why"))

    result = s.run(3.0, close)
    assert (result.outcome, result.reason, result.retryable) == (outcome, "why", False)
    assert (result.fingerprint, result.step) == (fingerprint, 70)
    assert 3 < result.seconds < 6


def test_agents_that_do_not_end_after_the_verdict_are_ended_within_the_grace(s: Stage) -> None:
    s.agents.stubborn = True
    assert s.run(3.0, s.at(s.done)).outcome is Outcome.SUCCEEDED
    assert 30 + END_RESERVE - 1 < s.since < 30 + END_RESERVE + 2
    assert len(s.agents.ends) == 1


@pytest.mark.parametrize("slurm_gives_up", [True, False])
def test_a_node_that_crashes_as_the_run_ends_is_not_waited_for(s: Stage, slurm_gives_up: bool) -> None:
    """It crashed while the workers saved; the others have ended, and srun waits for its task for ever."""
    s.agents.silent = True

    def crash_and_close() -> None:
        s.agents.of[1].frozen = True
        close_run(s.world.store, "unit", Outcome.PREEMPTED, "saved")

    known = s.at(lambda: s.agents.give_up(1) if slurm_gives_up else None)
    assert s.run(3.0, crash_and_close, 5.0, known).outcome is Outcome.PREEMPTED
    assert s.since < (3 if slurm_gives_up else 8)


# -- agents that end before the run does


@pytest.mark.parametrize("code", [0, 1, -11, None, 143])
def test_an_agent_that_ends_is_started_again_after_a_moment(s: Stage, code: int | None) -> None:
    assert s.run(3.0, s.at(lambda: s.agents.kill(1, code)), 3.0, s.done).outcome is Outcome.SUCCEEDED
    ((node, when),) = s.agents.relaunched
    assert node == 1
    assert SETTLE_SECONDS <= when - s.noted < SETTLE_SECONDS + 3 * TICK
    record = s.newest()
    assert (record.round, record.restarts_used, sorted(m.node for m in record.members)) == (1, 0, [0, 1, 2])
    (relaunched,) = s.names("agent_relaunched")
    assert (relaunched["node"], relaunched["name"]) == (1, "n1")
    assert relaunched["reason"].startswith("it ended: ")


def test_one_that_dies_again_and_again_is_given_up(s: Stage) -> None:
    deaths = [step for _ in range(RELAUNCHES_PER_NODE + 1) for step in (3.0, lambda: s.agents.kill(1))]
    result = s.run(*deaths, 10.0, s.done)
    assert len(s.agents.relaunched) == RELAUNCHES_PER_NODE
    assert s.world.store.list("gone") == ["00001"]
    assert result.outcome is Outcome.SUCCEEDED, "the others go on: MIN is 2"
    assert sorted(m.node for m in s.newest().members) == [0, 2]


def test_each_node_has_starts_of_its_own(s: Stage) -> None:
    deaths = [step for node in (0, 1, 2) * 3 for step in (3.0, lambda node=node: s.agents.kill(node))]
    assert s.run(*deaths, 3.0, s.done).outcome is Outcome.SUCCEEDED
    assert len(s.agents.relaunched) == 9
    assert s.world.store.list("gone") == []


@pytest.mark.parametrize(
    ("after", "code", "started"),
    [
        pytest.param(0.1, 2, True, id="a wrong use: it has said why, and would say it again"),
        pytest.param(0.1, None, False, id="srun could not start it"),
        pytest.param(0.1, 0, False, id="srun could not start it, and says 0"),
        pytest.param(3.0, UNHEALTHY_CODE, True, id="its node is unfit"),
        pytest.param(3.0, STORE_LOST_CODE, True, id="a new one would take what it finds for a run that begins"),
    ],
)
def test_one_that_would_end_the_same_way_is_given_up_at_once(
    s: Stage, after: float, code: int | None, started: bool
) -> None:
    result = s.run(after, lambda: s.agents.kill(1, code, started=started), 10.0, s.done)
    assert (s.agents.relaunched, s.world.store.list("gone")) == ([], ["00001"])
    assert result.outcome is Outcome.SUCCEEDED


def test_all_gone_without_a_verdict_closes_it_as_failed(s: Stage) -> None:
    result = s.run(3.0, lambda: s.agents.kill_all(2))
    assert (result.outcome, result.retryable) == (Outcome.FAILED, False)
    assert result.reason == "every agent refused to start the workers (exit code 2)"
    record = s.newest()
    assert (record.status, record.outcome) == (Status.CLOSED, Outcome.FAILED), "said in the store too"


@pytest.mark.parametrize(
    ("code", "started", "end"),
    [
        (2, True, (Outcome.FAILED, False, "every agent refused to start the workers (exit code 2)")),
        (None, False, (Outcome.TOO_FEW_NODES, True, "no agent could be started")),
        (UNHEALTHY_CODE, True, (Outcome.TOO_FEW_NODES, True, "no node is left: 3 of 3 failed a health check")),
    ],
    ids=["all refuse", "none can be started", "none is fit"],
)
def test_where_no_agent_starts_only_refusals_would_come_again(
    s: Stage, code: int | None, started: bool, end: tuple[Outcome, bool, str]
) -> None:
    s.launch_nothing(code, started=started, detail="no run here")
    result = s.run()
    assert (result.outcome, result.retryable, result.reason) == end
    assert result.seconds < (20 if code is None else module.ORPHANED_SECONDS / 2)


def test_one_that_was_to_be_started_again_is_not_when_the_run_ends_meanwhile(s: Stage) -> None:
    s.run(3.0, lambda: (s.agents.kill(1), s.signals.append(signal.SIGTERM)))
    assert s.agents.relaunched == []


@pytest.mark.parametrize(("outcome", "code"), [(Outcome.SUCCEEDED, 0), (Outcome.FAILED, 1)])
def test_nobody_is_started_again_for_an_end_that_a_cache_hides(s: Stage, outcome: Outcome, code: int) -> None:
    def close() -> None:
        s.look.store.keep()
        s.agents.of[0].participant.to_all.close(outcome, "over")

    result = s.run(3.0, close)
    assert result.outcome is outcome
    assert s.agents.relaunched == []
    assert {event["code"] for event in s.names("agent_ended")} == {code}


def test_a_store_that_does_not_answer_delays_a_restart_and_prevents_none(s: Stage) -> None:
    def kill() -> None:
        s.look.hangs = True
        s.agents.kill(1)

    s.run(3.0, s.at(kill), NEWS_SECONDS + 2.0, lambda: setattr(s.look, "hangs", False), 3.0, s.done)
    ((node, when),) = s.agents.relaunched
    assert node == 1
    assert NEWS_SECONDS <= when - s.noted < NEWS_SECONDS + SETTLE_SECONDS + 3 * TICK


# -- signals


def test_ctrl_c_closes_the_run_and_lets_the_workers_end(s: Stage) -> None:
    result = s.run(3.0, s.sent(signal.SIGINT))
    assert (result.outcome, result.reason, result.signal_number) == (Outcome.CANCELLED, "SIGINT on head", 2)
    assert s.agents.ends != [AT_ONCE]
    assert s.agents.terminated == [], "the store takes the end, and spares the agents the signal"
    assert s.names("notice") == [{"signal": "SIGINT", "sender": ""}]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_ctrl_c_or_one_after_another_signal_kills_at_once(s: Stage, first: signal.Signals) -> None:
    s.agents.stubborn = True
    assert s.run(3.0, s.sent(first), 2.0, s.at(s.sent(signal.SIGINT))).outcome is Outcome.CANCELLED
    assert s.since < 1
    assert s.agents.ends == [AT_ONCE]


def test_a_repeated_sigterm_tells_nothing(s: Stage) -> None:
    s.agents.stubborn = True
    term = s.sent(signal.SIGTERM)
    s.run(3.0, s.at(term), 1.0, term, 1.0, term)
    assert s.since > 30


def test_a_second_notice_that_leaves_as_much_time_or_more_tells_nothing_new(s: Stage) -> None:
    first, second, third = (
        s.sent(signal.SIGUSR2, SlurmAnswer(JobCondition.PREEMPTING, left)) for left in (60.0, 54.0, 120.0)
    )
    began = s.world.clock.now
    result = s.run(3.0, first, 5.0, second, 5.0, third)
    assert result.reason == "notice SIGUSR2 on head (preemption); n0, n1, n2 had not saved after 35 s"
    assert 35 < s.world.clock.now - began < 50
    assert len(s.names("signal_decided")) == 1


@pytest.mark.parametrize("heard_by", ["supervisor", "agents"])
def test_a_second_notice_that_leaves_less_time_shortens_the_first(s: Stage, heard_by: str) -> None:
    """A user's requeue with a long grace, and then a preemption with a short one, which the agents alone hear of."""
    s.answer = SlurmAnswer(JobCondition.RUNNING)

    def sooner() -> None:
        s.answer = SlurmAnswer(JobCondition.PREEMPTING, 20.0)
        if heard_by == "supervisor":
            s.signals.append(signal.SIGUSR2)
        else:
            for node, agent in s.agents.of.items():
                agent.participant.to_all.heard(f"SIGTERM on n{node}")

    result = s.run(3.0, s.sent(signal.SIGUSR2), 10.0, s.at(sooner))
    assert re.fullmatch(r"notice SIG\w+ on \w+ \(preemption\); n0, n1, n2 had not saved after 11 s", result.reason)
    assert 11 <= s.since < 20, "and not the 75 s that were left of the first"
    assert result.outcome is Outcome.PREEMPTED
    assert [told["seconds"] for told in s.names("signal_decided")] == [120.0, 20.0]
    assert s.supervisor._job_ends == pytest.approx(s.noted + 20, abs=1), "it would close the run itself, too"


@pytest.mark.parametrize(
    ("heard", "seconds_left", "end"),
    [
        (signal.SIGINT, None, (Outcome.CANCELLED, "SIGINT on head", 2)),
        (signal.SIGUSR2, None, (Outcome.PREEMPTED, "notice SIGUSR2 on head (requeue); no worker was running", None)),
        (None, 20.0, (Outcome.PREEMPTED, "notice seen by the supervisor (preemption); no worker was running", None)),
    ],
    ids=["Ctrl-C", "a notice", "a preemption that came before the supervisor"],
)
def test_what_comes_before_a_round_has_begun_ends_the_attempt(
    s: Stage, heard: signal.Signals | None, seconds_left: float | None, end: tuple[Outcome, str, int | None]
) -> None:
    s.signals += [heard] if heard is not None else []
    s.answer = SlurmAnswer(JobCondition.PREEMPTING, seconds_left) if seconds_left else s.answer
    result = s.run()
    assert (result.outcome, result.reason, result.signal_number) == end


def test_a_notice_that_no_node_acts_on_is_seen_to_here(s: Stage) -> None:
    due: list[float | None] = []

    def freeze() -> None:
        for agent in s.agents.of.values():
            agent.frozen = True
        s.signals.append(signal.SIGUSR2)

    result = s.run(3.0, freeze, 40.0, lambda: due.append(s.supervisor.due()))
    assert (result.outcome, result.reason) == (
        Outcome.PREEMPTED,
        "notice SIGUSR2 on head (requeue); the nodes did not answer in time",
    )
    assert due == [s.supervisor._notice_ends], "it wakes up for that though nothing comes"


ENDS = [
    (JobCondition.ENDED, Outcome.CANCELLED, "", False),
    (JobCondition.TIME_LIMIT, Outcome.TIMED_OUT, " (time limit)", False),
    (JobCondition.PREEMPTED, Outcome.PREEMPTED, " (preemption)", False),
    (JobCondition.REQUEUED, Outcome.PREEMPTED, " (requeue)", True),
]


def test_slurms_own_requeue_has_its_reason_and_the_node_that_could_not_launch(s: Stage) -> None:
    """A prolog that fails on one node, as on 22.05: Slurm drains the node, and requeues and holds the job."""
    s.answer = SlurmAnswer(JobCondition.REQUEUED, held="launch failed requeued held")
    s.agents.powerless = {0, 1, 2}
    s.agents.unlaunched = {1: "Job prolog failed"}
    result = s.run(0.1, s.sent(signal.SIGTERM))
    why = "SIGTERM on head (requeue; Slurm: launch failed requeued held)"
    assert (result.outcome, result.requeued) == (Outcome.PREEMPTED, True)
    assert result.reason == f"{why}; n1: Job prolog failed"


@pytest.mark.parametrize(("condition", "outcome", "why", "requeued"), ENDS)
@pytest.mark.parametrize("heard_by", ["supervisor", "agents"])
def test_what_a_sigterm_means_is_slurms_to_say(
    s: Stage, heard_by: str, condition: JobCondition, outcome: Outcome, why: str, requeued: bool
) -> None:
    s.answer, s.sender = SlurmAnswer(condition), "from pid 812 (slurmstepd)"
    if heard_by == "supervisor":
        result = s.run(3.0, s.sent(signal.SIGTERM))
        assert result.reason == f"SIGTERM on head{why}"
    else:
        heard = "SIGTERM on n1 from pid 812 (slurmstepd)"
        result = s.run(3.0, lambda: s.agents.of[1].participant.to_all.heard(heard))
        assert result.reason == f"SIGTERM on n1{why}"
    assert (result.outcome, result.signal_number) == (outcome, 15)
    assert (result.requeued, result.cancelled) == (requeued, False)
    (told,) = s.names("signal_decided")
    assert (told["slurm"], told["saves"]) == (condition.value, False)
    assert told["reason"].endswith(" from pid 812 (slurmstepd)")


def test_a_preemption_that_the_agents_hear_of_lets_the_workers_save(s: Stage) -> None:
    """And the SIGTERM at the end of its grace, which the supervisor hears too, is no end before they have."""

    def hear() -> None:
        s.answer = SlurmAnswer(JobCondition.PREEMPTING, 60.0)
        for node, agent in s.agents.of.items():
            agent.participant.to_all.heard(f"SIGTERM on n{node}")

    result = s.run(3.0, hear, 3.0, s.sent(signal.SIGTERM), 3.0, s.saved)
    assert result.outcome is Outcome.PREEMPTED
    assert re.fullmatch(r"notice SIGTERM on n\d \(preemption\); saved in \d+ of 35 s", result.reason)
    assert (result.signal_number, result.requeued, result.cancelled) == (None, False, False)
    record = s.newest()
    assert record.notice is not None
    assert record.notice.left == 60.0, "an agent ends its workers in what is left of it"


def test_a_cancel_while_the_workers_save_ends_everything(s: Stage) -> None:
    cancelled = s.sent(signal.SIGTERM, SlurmAnswer(JobCondition.ENDED))
    result = s.run(3.0, s.sent(signal.SIGUSR2), 3.0, cancelled)
    assert (result.outcome, result.reason, result.signal_number) == (Outcome.CANCELLED, "SIGTERM on head", 15)


@pytest.mark.parametrize("first", ["failed", "saved"])
def test_a_job_that_is_cancelled_while_the_attempt_ends_does_not_come_back(s: Stage, first: str) -> None:
    s.agents.stubborn = True

    def end() -> None:
        if first == "failed":
            s.agents.of[0].participant.to_all.close(Outcome.FAILED, "boom")
        else:
            s.signals.append(signal.SIGUSR2)
            s.saved()

    result = s.run(3.0, end, 5.0, s.sent(signal.SIGTERM, SlurmAnswer(JobCondition.ENDED)))
    assert result.outcome is (Outcome.FAILED if first == "failed" else Outcome.PREEMPTED)
    assert result.cancelled


def test_a_notice_that_nobody_gave_is_seen_when_the_limit_is_near(s: Stage) -> None:
    s.answer = SlurmAnswer(JobCondition.RUNNING, 150.0, 86400.0)

    def near() -> None:
        s.answer = SlurmAnswer(JobCondition.RUNNING, 120.0, 86400.0)

    def saved() -> None:
        record = s.newest()
        assert record.notice is not None
        s.saved()

    result = s.run(20.0, near, 15.0, saved)
    assert result.outcome is Outcome.PREEMPTED
    assert result.reason.startswith("notice seen by the supervisor (time limit); saved in ")
    (told,) = s.names("signal_decided")
    assert (told["call"], told["meaning"], told["seconds"]) == ("no signal: the state of the job", "time limit", 120.0)


def test_an_end_that_no_log_could_take_is_known_all_the_same(s: Stage) -> None:
    s.look.hangs = True
    s.answer = SlurmAnswer(JobCondition.PREEMPTED)
    s.signals.append(signal.SIGTERM)

    result = s.run(5.0, lambda: s.agents.kill_all(143, detail="Terminated"))
    assert (result.outcome, result.reason) == (Outcome.PREEMPTED, "SIGTERM on head (preemption)")
    assert s.agents.terminated, "and the agents heard of it by a signal"


# -- the store


def test_a_store_that_can_not_be_read_ends_the_attempt(s: Stage) -> None:
    s.agents.stubborn = True

    def fail() -> None:
        s.look.failure = StoreError(root="/s", why="no space")

    result = s.run(3.0, fail)
    assert result.outcome is Outcome.FAILED
    assert "no space" in result.reason
    assert s.agents.ends


def test_it_sleeps_while_nodes_have_not_met_and_logs_once_that_they_have_not(
    s: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    launch = s.agents.launch

    def freeze(is_frozen: bool) -> None:
        for agent in s.agents.of.values():
            agent.frozen = is_frozen

    def launch_frozen() -> None:
        launch()
        freeze(True)

    s.agents.launch = launch_frozen  # type: ignore[method-assign]
    s.supervisor.job_watch = JobWatch(
        lambda: ("n0", "n1", "n2"), events=s.supervisor.events, clock=s.world.clock, start=lambda work: work()
    )
    due: list[float | None] = []
    s.run(2 * LOOK_SECONDS, lambda: due.append(s.supervisor.due()), lambda: freeze(False), 3.0, s.done)
    assert due == [None], "were it in the past, because the job is to be looked at, the loop would not sleep at all"
    assert [message for message in caplog.messages if "have not joined after 30 s" in message] == [caplog.messages[0]]
    assert module.logger.name == caplog.records[0].name


# -- a store that is lost, or does not answer


def test_all_agents_lost_the_store_and_the_supervisor_sees_why(s: Stage) -> None:
    def see() -> None:
        s.look.failure = StoreWipedError(root="/runs/x/store", why="was removed")

    result = s.run(3.0, lambda: s.agents.kill_all(STORE_LOST_CODE, detail="exit code 94"), 8.0, see)
    assert result.outcome is Outcome.FAILED
    assert "/runs/x/store was removed" in result.reason
    assert s.agents.relaunched == []
    assert s.agents.terminated, "those that do not know yet hear of it by signal"


@pytest.mark.parametrize("why", ["it hangs", "no node has met"])
def test_a_store_that_does_not_take_the_end_has_the_agents_told_by_signal(s: Stage, why: str) -> None:
    if why == "no node has met":
        s.launch_nothing(ends=False)

    def hang() -> None:
        s.look.hangs = why == "it hangs"
        s.signals.append(signal.SIGINT)

    def end() -> None:
        assert s.agents.terminated
        s.agents.kill_all(143, detail="exit code 143")

    result = s.run(3.0, hang, SILENT_SECONDS + 1, end)
    assert (result.outcome, result.signal_number) == (Outcome.CANCELLED, signal.SIGINT)
    assert len(s.agents.terminated) == 1
    assert result.seconds < 3 + SILENT_SECONDS + 3, "and nothing more is waited for"


# -- between events it sleeps, for as long as it says


class Sleeper:
    """From `begin` on, time passes from one moment that the supervisor has asked for to the next."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._take = stage.agents.take
        self.turns: list[float] = []
        """When its loop woke up."""

    def begin(self) -> None:
        def take() -> list[AgentEnd]:
            clock = self._stage.world.clock
            due = self._stage.supervisor.due()
            assert due is not None, "it would sleep for ever"
            clock.now = max(clock.now, due) - TICK
            ended = self._take()
            self.turns.append(clock.now)
            assert len(self.turns) < 20, "it does not sleep"
            return ended

        self._stage.agents.take = take  # type: ignore[method-assign]


def test_a_run_that_goes_on_needs_no_look_at_all(s: Stage) -> None:
    due: list[float | None] = []
    s.run(3.0, lambda: due.append(s.supervisor.due()), 30.0, lambda: due.append(s.supervisor.due()), 1.0, s.done)
    assert due == [pytest.approx(s.supervisor._started_at + LAUNCH_NEWS_SECONDS), None]


def test_a_dead_agent_is_started_again_in_time_without_polling(s: Stage) -> None:
    sleeper = Sleeper(s)

    def kill() -> None:
        s.look.hangs = True
        s.agents.kill(1)
        sleeper.begin()
        s.agents.relaunch = lambda node: s.signals.append(signal.SIGTERM)  # type: ignore[method-assign]

    s.run(3.0, s.at(kill))
    assert sleeper.turns[0] - s.noted == pytest.approx(NEWS_SECONDS + SETTLE_SECONDS, abs=2 * TICK)
    assert len(sleeper.turns) < 6


def test_a_silent_store_and_stubborn_agents_are_waited_for_without_polling(s: Stage) -> None:
    s.agents.stubborn = True
    sleeper = Sleeper(s)

    def hang() -> None:
        s.look.hangs = True
        s.signals.append(signal.SIGINT)
        s.agents.take()  # the turn that takes the signal in
        sleeper.begin()

    s.run(3.0, s.at(hang))
    assert s.agents.terminated[0] - s.noted == pytest.approx(SILENT_SECONDS, abs=3 * TICK)
    assert s.since == pytest.approx(SILENT_SECONDS + 30.0 + module.SILENT_RESERVE, abs=5 * TICK)
    assert len(sleeper.turns) <= 4


def test_the_end_of_all_agents_is_dealt_with_without_polling(s: Stage) -> None:
    sleeper = Sleeper(s)

    def all_die() -> None:
        s.look.hangs = True
        s.agents.kill_all(None, started=False)
        taken = s.agents.take

        def last() -> list[AgentEnd]:
            s.agents.take = taken  # type: ignore[method-assign]
            sleeper.begin()
            return taken()

        s.agents.take = last  # type: ignore[method-assign]

    result = s.run(3.0, s.at(all_die))
    assert (result.outcome, result.reason) == (Outcome.TOO_FEW_NODES, "no agent could be started")
    waited = module.ORPHANED_SECONDS + module.CLOSE_SECONDS
    assert s.since == pytest.approx(waited, abs=5 * TICK)
    assert len(sleeper.turns) <= 4

"""Whether a round's failures are worth another round, with the reason that a person reads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.agent.hang_stop import WorkerSlot
from hpc_elastic.agent.local_workers import LocalWorkers
from hpc_elastic.agent.restart_policy import RestartPolicy, early_failure, may_wait, sum_up
from hpc_elastic.agent.worker_evidence import StopRecord, WorkerEvidence
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.rendezvous.proposals import RestartDecision
from hpc_elastic.rendezvous.state import FailureMemory, HangMark, Member, NodeFailure, RoundRecord
from hpc_elastic.workers.spawn import ExitStatus
from tests.rigs.agent_site import make_group_site
from tests.rigs.fake_clock import FakeClock
from tests.rigs.run_builder import make_failure
from tests.rigs.specs import make_record

POLICY = RestartPolicy(max_restarts=3, max_same_failures=2, restart_window=600.0)


def record(used: int = 0, memory: FailureMemory | None = None) -> RoundRecord:
    return make_record(members=(), restarts_used=used, memory=memory or FailureMemory())


def failure(failure_class: str = "root", **changes: Any) -> NodeFailure:
    plain = NodeFailure(
        node=0, fingerprint="F", failure_class=failure_class, retryable=True, message="ValueError: x", seconds=5.0
    )
    return replace(plain, **({"fingerprint": ""} if failure_class != "root" else {}), **changes)


def before(**known: Any) -> FailureMemory:
    return FailureMemory(**{"fingerprint": "F", "times": 1, **known})


def decide_restart(
    *failures: NodeFailure,
    used: int = 0,
    memory: FailureMemory | None = None,
    policy: RestartPolicy = POLICY,
) -> RestartDecision:
    return policy.decide_restart(record(used, memory), failures)


def test_a_round_without_failures_is_free() -> None:
    memory = before(step=5)
    decision = decide_restart(used=3, memory=memory)
    assert (decision.go_on, decision.restarts_used) == (True, 3)
    assert decision.memory == memory, "a change of members is no progress and no failure"


@pytest.mark.parametrize("failure_class", ["root", "symptom", "infrastructure", "unknown"])
def test_every_failure_that_is_left_is_charged(failure_class: str) -> None:
    decision = decide_restart(failure(failure_class))
    assert (decision.go_on, decision.restarts_used) == (True, 1)
    assert not decide_restart(failure(failure_class), used=3).go_on


def test_a_budget_of_nothing_allows_one_start() -> None:
    policy = replace(POLICY, max_restarts=0)
    assert not decide_restart(failure(), policy=policy).go_on
    assert decide_restart(policy=policy).go_on


EXHAUSTED = (0, "restarts exhausted (3 of 3 restarts used): ValueError: x")
REFILLED = (1, "restart 1 of 3 (2 left, refilled by 3600 good seconds) after: ValueError: x")


@pytest.mark.parametrize(
    ("used", "window", "seconds", "then"),
    [
        pytest.param(0, 600.0, 5.0, (1, "restart 1 of 3 (2 left) after: ValueError: x"), id="the first"),
        pytest.param(2, 600.0, 5.0, (3, "restart 3 of 3 (0 left) after: ValueError: x"), id="the last"),
        pytest.param(3, 600.0, 5.0, EXHAUSTED, id="a spent one ends the attempt, and another one may do better"),
        pytest.param(3, 3600.0, 3600.0, REFILLED, id="good seconds refill it"),
        pytest.param(3, 3600.0, 3599.0, EXHAUSTED, id="too few do not"),
        pytest.param(3, None, 1e6, EXHAUSTED, id="nothing does where it is not asked for"),
        pytest.param(
            0, 1.0, 500.0, (1, "restart 1 of 3 (2 left) after: ValueError: x"), id="an untouched one is not refilled"
        ),
    ],
)
def test_the_budget_and_what_refills_it(used: int, window: float | None, seconds: float, then: tuple[int, str]) -> None:
    memory, policy = FailureMemory(fingerprint="G", times=1, step=10), replace(POLICY, restart_window=window)
    decision = decide_restart(failure(step=10**6, seconds=seconds), used=used, memory=memory, policy=policy)
    assert (decision.restarts_used, decision.reason) == then
    assert (decision.go_on, decision.retryable) == (then is not EXHAUSTED, True)
    assert decision.memory.fingerprint == "F", "the next one is compared with it, also of another attempt"


def test_of_several_hangs_the_furthest_behind_is_the_cause() -> None:
    def hang(step: int, age: float, message: str) -> NodeFailure:
        return replace(failure("hang"), hang=HangMark(step, age), message=message, fingerprint=message)

    waits, first, second = hang(8, 70.0, "waits"), hang(7, 60.0, "first"), hang(7, 59.0, "second")
    decision = decide_restart(waits, second, first, failure("symptom"))
    assert decision.reason.endswith("after: first")
    assert decision.memory.fingerprint == "first"
    assert "ValueError: x" in decide_restart(waits, failure()).reason, "an exception tells more"


@pytest.mark.parametrize("fingerprint", ["hang:stopped", "hang:kernel"])
def test_a_hang_that_is_no_bug_in_the_script_never_counts_as_the_same_again(fingerprint: str) -> None:
    memory = FailureMemory(fingerprint=fingerprint, times=1, step=7)
    decision = decide_restart(replace(failure("hang", step=7), fingerprint=fingerprint), memory=memory)
    assert decision.go_on
    assert (decision.memory.fingerprint, decision.memory.times) == (fingerprint, 1)


def test_a_failure_that_says_so_is_not_tried_again() -> None:
    decision = decide_restart(failure(), failure(retryable=False, message="exit code 93"))
    assert (decision.go_on, decision.retryable, decision.reason) == (False, False, "not retryable: exit code 93")


# -- the same failure twice


@pytest.mark.parametrize("used", [1, 3])
def test_the_same_failure_twice_with_no_progress_is_a_bug(used: int) -> None:
    """Also where the budget is spent: another attempt would end the same way."""
    first = decide_restart(failure(step=10))
    assert first.go_on
    assert first.memory == before(step=10)
    second = decide_restart(failure(step=10), used=used, memory=first.memory)
    assert (second.go_on, second.retryable, second.memory.times) == (False, False, 2)
    assert "this looks like a bug in the script: the same failure 2 times in a row" in second.reason
    assert "ValueError: x" in second.reason


@pytest.mark.parametrize(
    ("memory", "now", "times"),
    [
        pytest.param(before(step=10), {"step": 11}, 1, id="a later step is progress"),
        pytest.param(before(step=10), {"step": 10}, 2, id="the same step is none"),
        pytest.param(before(step=10), {"step": 9}, 2, id="an earlier one is none"),
        pytest.param(before(step=10), {"step": 10, "seconds": 9000.0}, 2, id="steps say more than hours"),
        pytest.param(before(step=10), {"step": 11, "seconds": 0.1}, 1, id="or seconds"),
        pytest.param(before(counted_steps=25), {"counted_steps": 35}, 1, id="more steps than in the round before"),
        pytest.param(before(counted_steps=25), {"counted_steps": 25, "seconds": 9000.0}, 2, id="as many are none"),
        # Of fewer it is not known where they began.
        pytest.param(before(counted_steps=25), {"counted_steps": 5}, 2, id="fewer of a short round are none"),
        pytest.param(before(counted_steps=25), {"counted_steps": 5, "seconds": 600.0}, 1, id="of a long one they are"),
        pytest.param(before(), {"counted_steps": 5}, 2, id="a first count says nothing"),
        pytest.param(before(), {"seconds": 599.0}, 2, id="without steps a short round is none"),
        pytest.param(before(), {"seconds": 600.0}, 1, id="a long one is"),
        pytest.param(before(), {"step": 5, "seconds": 5.0}, 2, id="a first step of a short round is none"),
        pytest.param(before(), {"step": 5, "seconds": 600.0}, 1, id="of a long one it is"),
        pytest.param(before(step=10), {"seconds": 5.0}, 2, id="a short round that lost its steps is none"),
        pytest.param(before(fingerprint="G", times=5), {}, 1, id="another failure starts anew"),
        pytest.param(FailureMemory(), {}, 1, id="the first failure"),
        pytest.param(before(), {"fingerprint": ""}, 0, id="one that does not count as the script's"),
        pytest.param(FailureMemory(), {"fingerprint": ""}, 0, id="twice such a one"),
    ],
)
def test_what_counts_as_the_same_again(memory: FailureMemory, now: dict[str, Any], times: int) -> None:
    assert decide_restart(failure(**now), memory=memory).memory.times == times


@pytest.mark.parametrize(
    ("changes", "rule"),
    [({"step": 10}, "between (V"), ({"counted_steps": 25}, "between (V"), ({"counted_steps": 5}, "600 s of the start")],
)
def test_the_reason_to_give_up_names_the_rule(changes: dict[str, Any], rule: str) -> None:
    memory = before(step=changes.get("step", -1), counted_steps=25)
    assert rule in decide_restart(failure(**changes), memory=memory).reason


AT_10 = before(step=10)


def test_the_longest_round_and_the_furthest_step_of_any_node_count() -> None:
    assert decide_restart(failure(step=3), failure("symptom", step=12), memory=AT_10).memory.times == 1
    no_step = before()
    assert decide_restart(failure(seconds=1.0), failure("symptom", seconds=700.0), memory=no_step).memory.times == 1


@pytest.mark.parametrize(("changes", "step"), [({"step": 4}, 10), ({}, 10), ({"step": 14}, 14)])
def test_the_furthest_step_is_never_forgotten(changes: dict[str, int], step: int) -> None:
    assert decide_restart(failure(**changes), memory=AT_10).memory.step == step


def read_only(node: int, fingerprint: str = "OSError:1a") -> NodeFailure:
    return replace(failure("infrastructure", node=node), fingerprint=fingerprint)


def test_a_read_only_filesystem_of_all_nodes_is_a_wrong_path_and_of_one_its_mount() -> None:
    first = POLICY.decide_restart(_in_round(0, 1), [read_only(0)])
    assert first.go_on
    again = replace(_in_round(0, 1), memory=first.memory)
    assert POLICY.decide_restart(again, [read_only(0)]).go_on, "the other node does not say so"
    both = POLICY.decide_restart(again, [read_only(0), read_only(1)])
    assert (both.go_on, both.retryable) == (False, False)
    assert "the same failure 2 times in a row" in both.reason
    alone = replace(_in_round(0), memory=first.memory)
    assert not POLICY.decide_restart(alone, [read_only(0)]).go_on, "there is no other node"


@pytest.mark.parametrize(("times", "most", "go_on"), [(3, 5, True), (3, 4, False), (3, 0, True), (0, 1, False)])
def test_the_limit_on_equal_failures_can_be_another_one_or_none(times: int, most: int, go_on: bool) -> None:
    memory = FailureMemory(fingerprint="F", times=times, step=1)
    assert decide_restart(failure(step=1), memory=memory, policy=replace(POLICY, max_same_failures=most)).go_on is go_on


# -- which failure it is about


@pytest.mark.parametrize("turn", [1, -1])
def test_the_cause_is_the_strongest_failure(turn: int) -> None:
    root = failure("root", message="root", fingerprint="R")
    machine = failure("infrastructure", message="machine")
    symptom = failure("symptom", message="symptom")
    unknown = failure("unknown", message="unknown")
    found = decide_restart(*[symptom, unknown, machine, root][::turn])
    assert found.reason.endswith("after: root")
    assert found.memory.fingerprint == "R"
    assert decide_restart(*[symptom, unknown, machine][::turn]).reason.endswith("after: machine")


ROOT, SYMPTOM, MACHINE = FailureClass.ROOT, FailureClass.SYMPTOM, FailureClass.INFRASTRUCTURE


def failed(
    rank: int,
    ended: int,
    failure_class: FailureClass = ROOT,
    *,
    signal: str = "",
    retryable: bool = True,
    step: int | None = None,
) -> WorkerFailure:
    return WorkerFailure(
        global_rank=rank,
        ended_ns=ended,
        failure_class=failure_class,
        signal=signal,
        message=f"failure of {rank}\nand more",
        fingerprint=f"F{rank}",
        retryable=retryable,
        last_step=step,
    )


def test_one_failure_is_told_by_rank_and_first_line() -> None:
    assert sum_up([failed(5, 1)], node=2, seconds=7.5) == NodeFailure(
        node=2, message="rank 5: failure of 5", fingerprint="F5", failure_class="root", retryable=True, seconds=7.5
    )


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        pytest.param([failed(0, 30), failed(1, 10), failed(2, 20)], 1, id="the first"),
        pytest.param([failed(0, 10, SYMPTOM), failed(1, 90)], 1, id="a root before symptoms"),
        pytest.param([failed(0, 10, SYMPTOM), failed(1, 90, MACHINE)], 1, id="the machine before symptoms"),
        pytest.param([failed(1, 10, MACHINE), failed(0, 90)], 1, id="the earliest cause"),
        pytest.param([failed(0, 10, MACHINE), failed(1, 10)], 1, id="at one time the script's"),
        pytest.param([failed(0, 90, SYMPTOM), failed(1, 10, SYMPTOM)], 1, id="symptoms"),
    ],
)
def test_the_strongest_and_then_the_first_is_told(failures: list[WorkerFailure], rank: int) -> None:
    assert sum_up(failures, node=0, seconds=1.0).message.startswith(f"rank {rank}:")


@pytest.mark.parametrize(("signal", "failure_class"), [("SIGKILL", FailureClass.ROOT), ("SIGTERM", MACHINE)])
def test_a_kill_right_after_each_start_is_the_same_failure_again(signal: str, failure_class: FailureClass) -> None:
    found = sum_up([failed(0, 1, failure_class, signal=signal)], node=0, seconds=0.9, counted_steps=0)
    first = decide_restart(found)
    assert first.go_on
    second = decide_restart(found, used=1, memory=first.memory)
    assert (second.go_on, second.retryable) == (False, False)
    assert second.reason.startswith("each start ends the same way: the same failure 2 times in a row")
    assert "each within 1 s of the start (--max-same-failures)" in second.reason
    assert decide_restart(found, used=1, memory=first.memory, policy=replace(POLICY, max_same_failures=0)).go_on


def test_an_image_that_no_node_has_is_a_wrong_one_and_of_one_node_its_own() -> None:
    text = "Error: initializing source docker://localhost/nosuchimage:1: pinging container registry localhost"
    one = replace(make_failure(0, at=1, exitcode=125, stderr_tail=text), message=text, fingerprint="exit:125:1a")
    assert not one.node_suspect
    here, there = (sum_up([replace(one, node=node)], node=node, seconds=3.0, workers=1) for node in (0, 1))
    memory = POLICY.decide_restart(_in_round(0, 1), [here, there]).memory
    second = replace(_in_round(0, 1), memory=memory)
    again = POLICY.decide_restart(second, [here, there])
    assert (again.go_on, again.retryable, again.apart) == (False, False, ())
    assert "nosuchimage:1" in again.reason
    assert POLICY.decide_restart(second, [here]).go_on


@pytest.mark.parametrize(
    ("failure_class", "signal", "fingerprint"),
    [
        *((ROOT, signal, "F0") for signal in ("SIGSEGV", "SIGABRT", "SIGFPE", "SIGBUS", "")),
        # A kill from outside never counts as the script's own.
        *((ROOT, f"SIG{name}", "") for name in ("KILL", "TERM", "INT", "HUP", "USR1", "USR2", "QUIT")),
        (SYMPTOM, "", ""),
        (MACHINE, "", ""),
    ],
)
@pytest.mark.parametrize("how", [{"seconds": 1.1}, {"seconds": 1.0, "step": 0}, {"seconds": 1.0, "counted_steps": 1}])
def test_what_is_the_scripts_own_has_a_fingerprint(
    failure_class: FailureClass, signal: str, fingerprint: str, how: dict[str, Any]
) -> None:
    summary = sum_up([failed(0, 1, failure_class, signal=signal)], node=0, **how)
    assert (summary.fingerprint, summary.failure_class) == (fingerprint, failure_class.value)


def test_one_that_must_not_be_tried_again_and_the_furthest_step_of_any_count() -> None:
    assert sum_up([failed(0, 1), failed(1, 2, SYMPTOM, retryable=False)], node=0, seconds=1.0).retryable is False
    assert sum_up([failed(0, 1, step=3), failed(1, 2, step=0), failed(2, 3)], node=0, seconds=1.0).step == 3
    assert sum_up([failed(0, 1, step=0)], node=0, seconds=1.0).step == 0


class _TickingClock(FakeClock):
    """Each look at it is a second later."""

    def time_ns(self) -> int:
        self.now += 1
        return super().time_ns()


def test_whom_one_look_finds_ended_are_told_with_one_time() -> None:
    clock = _TickingClock()

    def ended(code: int) -> ExitStatus:
        now = clock.time_ns()
        return ExitStatus(exitcode=code, core_dumped=False, observed_ns=now, observed_uptime_ns=now)

    workers = object.__new__(LocalWorkers)
    workers._clock, workers._stopper, workers._container, workers._is_wrapped = clock, None, None, False
    workers._were_ended, workers._by_guardian = (lambda: False), False
    workers._slots = [
        WorkerSlot(rank, rank, SimpleNamespace(pid=rank, poll=partial(ended, rank)), None)  # type: ignore[arg-type]
        for rank in (1, 2)
    ]
    assert workers.poll()
    exits = [slot.exit for slot in workers._slots]
    assert [each.exitcode for each in exits if each is not None] == [1, 2]
    assert len({(each.observed_ns, each.observed_uptime_ns) for each in exits if each is not None}) == 1
    assert not workers.poll()


def test_what_this_node_is_short_of_to_start_workers_is_no_bug_in_the_script() -> None:
    layout, inert = SimpleNamespace(first_rank=4, local_world_size=2), SimpleNamespace()
    evidence = WorkerEvidence(make_group_site(Path("/r/attempt-000"), layout=layout), StopRecord(), inert)  # type: ignore[arg-type]
    found = evidence.describe_start_failure(0, OSError(24, "Too many open files"))
    assert (found.global_rank, found.retryable) == (4, True)
    assert sum_up([found], node=0, seconds=0.0).fingerprint == ""


@pytest.mark.parametrize("final", [False, True])
def test_the_first_word_tells_whether_another_try_is_wanted(final: bool) -> None:
    """In a notice nobody waits for the second one."""
    workers: Any = SimpleNamespace(want_no_other_try=final, seconds=3.0, wants_look=False)
    watch: Any = SimpleNamespace(mark=None, furthest_step=7, counted_steps=-1)
    word = early_failure("rank 0 ended with exit code 93", node=1, workers=workers, watch=watch)
    assert (word.retryable, word.seconds, word.step) == (not final, 3.0, 7)


# -- contrast between nodes


def _in_round(*nodes: int) -> RoundRecord:
    return replace(record(), members=tuple(Member(f"{node:05d}-n{node}", node, 2) for node in nodes))


def _lacks(node: int, *, alike: int = 2, waited: float = 1.0, retryable: bool = False) -> NodeFailure:
    return failure(node=node, alike=alike, waited=waited, retryable=retryable, message="rank 2: ModuleNotFoundError: x")


def test_what_one_node_alone_lacks_is_worth_another_round_without_it() -> None:
    decision = POLICY.decide_restart(_in_round(0, 1, 2), [_lacks(1)])
    assert (decision.go_on, decision.restarts_used, decision.apart) == (True, 1, (1,))
    again = replace(_in_round(0, 1, 2), memory=FailureMemory(fingerprint="F", times=5))
    assert POLICY.decide_restart(again, [_lacks(1, retryable=True)]).apart == (1,)
    none_left = replace(POLICY, max_restarts=0).decide_restart(_in_round(0, 1), [_lacks(1)])
    assert (none_left.go_on, none_left.retryable) == (False, True), "another attempt may go well all the same"


def test_what_all_nodes_lack_is_not() -> None:
    decision = POLICY.decide_restart(_in_round(0, 1), [_lacks(0), _lacks(1)])
    assert (decision.go_on, decision.retryable, decision.apart) == (False, False, ())
    for one in (_lacks(1, alike=1), _lacks(1, waited=0.0)):
        assert not POLICY.decide_restart(_in_round(0, 1), [one]).go_on


def test_a_node_sums_up_how_many_of_its_workers_failed_alike() -> None:
    failed = [
        replace(make_failure(rank, at=1, exception="ImportError: no x", per_node=2), waited=1.0) for rank in (2, 3)
    ]
    summed = sum_up(failed, node=1, seconds=1.0, workers=2)
    assert (summed.alike, summed.waited, summed.retryable) == (2, 1.0, False)
    assert sum_up([make_failure(2, at=1, exitcode=-9)], node=1, seconds=1.0, workers=2).alike == 0


MISSING = make_failure(2, at=1, exception="FileNotFoundError: x").fingerprint


@pytest.mark.parametrize(
    ("exception", "changes", "waits"),
    [
        pytest.param("ImportError: no x", {}, True, id="a package that is missing: no recovery is delayed"),
        pytest.param("FileNotFoundError: x", {}, False, id="a file, the first time: a restart may help"),
        pytest.param("FileNotFoundError: x", {"memory": before(fingerprint=MISSING)}, True, id="again"),
        pytest.param("FileNotFoundError: x", {"restarts_used": 3}, True, id="with no restart left"),
        pytest.param("ValueError: bad", {"restarts_used": 3}, False, id="a bug"),
        pytest.param("ImportError: no x", {"members": ()}, False, id="a round of one node"),
    ],
)
def test_the_others_get_their_moment_where_that_delays_no_recovery(
    exception: str, changes: dict[str, Any], waits: bool
) -> None:
    of = replace(_in_round(0, 1), **changes)
    assert may_wait(make_failure(2, at=1, exception=exception), of, max_restarts=3) is waits


def test_the_reason_names_no_victim_as_the_cause() -> None:
    lost = replace(failure("symptom"), message="rank 1: RuntimeError: Connection closed by peer")
    after = "cause not known, first seen: rank 1: RuntimeError: Connection closed by peer"
    assert decide_restart(lost).reason == f"restart 1 of 3 (2 left) after: {after}"
    assert decide_restart(lost, used=3).reason == f"restarts exhausted (3 of 3 restarts used): {after}"

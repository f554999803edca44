"""The in-process restart group with real ranks: what happens to one of them, and what all of them do then."""

from __future__ import annotations

import signal

import pytest

from tests.rigs.inprocess_endings import SAVED
from tests.rigs.inprocess_ranks import Job, run_jobs

pytestmark = pytest.mark.torch


JOBS = {
    # Those that wait for long timeouts come first: they run beside all others.
    "deaths": "deaths:4:faults=kill,gil,stop",
    "cut-off": "lost_host:3:victim=2:what=connection",
    "stubborn": "stubborn:3",
    "lost-host": "lost_host:4:victim=0:what=node:elsewhere=collective",
    "lost-server": "lost_host:4:victim=0:what=monitor",
    "phases": "phases:8:phases=abort,finalize,check,terminating,assign,starting,completing",
    "gentle": "gentle_faults:3",
    "hooks": "hooks:2",
    "counted": "counted_faults:1:device=cpu",
    "leave-finalize": "leaving:3:how=finalize:store=shared",
    "leave-health_check": "leaving:3:how=health_check:store=shared",
    "leave-interrupt": "leaving:3:how=interrupt:store=shared",
    "leave-abort": "leaving:3:how=abort",
    "deaths-of-8": "deaths:8:faults=term,int,segfault,abort,kill,segfault,int",
    "deaths-of-2": "deaths:2:faults=abort",
    "death-of-0": "deaths:3:faults=kill:victim=0:store=shared",
    "death-of-0-tcp": "deaths:3:faults=kill:victim=0",
    "phases-first": "phases:4:phases=initialize,check-before,starting:store=file",
    "at-once": "at_once:8",
    "gaps": "assigned:4:how=gaps",
    "pairs": "assigned:4:how=pairs",
    "lost": "lost_node:3:store=shared",
    "spares": "spares:4",
    "pings": "pings:2",
    "protected": "protected:2",
    "nested": "nested:2",
    "held": "held_tensors:2:store=file",
    "host-leaves": "host_leaves:3",
    "completion-late": "completion_is_late:2",
    "alone": "nobody_else_comes:2:store=shared",
    "death-at-first-barrier": "dies_at_the_first_barrier:3",
    "monitor-fails": "monitor_fails:2",
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """All of them, in one process that has imported torch once."""
    folder = tmp_path_factory.mktemp("inprocess")
    return dict(zip(JOBS, run_jobs(folder, *JOBS.values()), strict=True))


def test_exceptions_hangs_and_swallowed_interruptions_restart_all(jobs: dict[str, Job]) -> None:
    job = jobs["gentle"]
    assert [rank.exit_code for rank in job.ranks] == [0, 0, 0], job.output
    for rank, result in enumerate(job.results):
        for name in ("exception", "own_wish", "except", "destructor", "generator", "c_callback", "never_ending_sleep"):
            iteration, together, number, world_size, seconds = result[name]
            assert (iteration, together, number, world_size) == (1, 3, rank, 3), name
            assert seconds < 45, f"{name}: gloo's own timeout is 60 s"
        # Nothing is left behind, from one call to the sixth.
        assert result["after"] == result["before"]
        assert result["after"]["threads"] == ["MainThread"]
        assert result["after"]["children"] == []
        assert result["after"]["handler"] == str(signal.SIG_DFL.value)
        assert result["after"]["frozen"] == 0
        assert result["after"]["helper"] == "_new_process_group_helper"
    assert "RankShouldRestart was swallowed; it had been raised at" in job.output


def test_hooks_run_in_order_and_their_failures_restart_all(jobs: dict[str, Job]) -> None:
    job = jobs["hooks"]
    # Rank 1 fails in initialize, in the health check before the function, and in the function.
    assert job.results[1] == [
        *("initialize 0", "abort False", "finalize ValueError", "check ValueError"),
        *("initialize 1", "check NoneType", "abort False", "finalize KeyError", "check KeyError"),
        *("initialize 2", "check NoneType", "function 2", "abort False", "finalize ValueError", "check ValueError"),
        *("initialize 3", "check NoneType", "function 3"),
    ], job.output
    others = job.results[0]
    assert others[-3:] == ["initialize 3", "check NoneType", "function 3"]
    assert others.count("abort False") == 3


def test_a_rank_may_cause_so_many_faults(jobs: dict[str, Job]) -> None:
    """As tests/gpu has it on a GPU."""
    assert "rank 0 has caused 2 faults" in jobs["counted"].ranks[0].error, jobs["counted"].output


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("finalize", "KeyError: 'finalize'"),
        ("health_check", "HealthCheckError: rank 2 is not healthy: 'check'"),
        ("interrupt", "KeyboardInterrupt: "),
        ("abort", "RestartAbort: enough"),
    ],
)
def test_a_rank_leaves_and_the_others_go_on(jobs: dict[str, Job], how: str, error: str) -> None:
    job = jobs[f"leave-{how}"]
    assert job.ranks[2].error == error, job.output
    assert [result[:4] for result in job.results[:2]] == [[1, 2, 0, 2], [1, 2, 1, 2]]


def test_processes_that_die_or_hang_are_left_behind_one_by_one(jobs: dict[str, Job]) -> None:
    job = jobs["deaths"]
    assert job.results[0] == [[0, 0, 4], [1, 0, 3], [2, 0, 2], [3, 0, 1]], job.output
    assert job.ranks[3].exit_code == -signal.SIGKILL
    # Held in C, or stopped: SIGTERM does it where no handler is in its way.
    for rank in job.ranks[1:3]:
        assert rank.exit_code in (-signal.SIGKILL, -signal.SIGTERM)


def test_whatever_ends_a_process_the_others_go_on(jobs: dict[str, Job]) -> None:
    job = jobs["deaths-of-8"]
    assert job.results[0] == [[iteration, 0, 8 - iteration] for iteration in range(8)], job.output
    endings = [rank.error or signal.Signals(-rank.exit_code).name for rank in job.ranks[:0:-1]]
    assert endings == [
        "SIGTERM",
        "KeyboardInterrupt: ",
        "SIGSEGV",
        "SIGABRT",
        "SIGKILL",
        "SIGSEGV",
        "KeyboardInterrupt: ",
    ]
    assert jobs["deaths-of-2"].results[0] == [[0, 0, 2], [1, 0, 1]]


@pytest.mark.parametrize("name", ["phases", "phases-first"])
def test_a_rank_may_die_in_any_phase(jobs: dict[str, Job], name: str) -> None:
    job = jobs[name]
    assert [rank.exit_code for rank in job.ranks[1:]] == [-signal.SIGKILL] * (len(job.ranks) - 1), job.output
    assert job.ranks[0].exit_code == 0, job.output
    iteration, rank, world_size = job.results[0][-1]
    assert (rank, world_size) == (0, 1), "it is alone in the end"
    for (_, _, before), (_, _, after) in zip(job.results[0], job.results[0][1:], strict=False):
        assert after < before, "nobody comes back, and none of them is waited for"
    assert iteration >= len(job.results[0]) - 1


def test_faults_of_several_ranks_at_once_are_one_restart_or_two(jobs: dict[str, Job]) -> None:
    job = jobs["at-once"]
    assert job.ranks[7].exit_code == -signal.SIGKILL, job.output
    assert job.ranks[6].error == "KeyboardInterrupt: "
    iterations = {result[0] for result in job.results[:6]}
    assert len(iterations) == 1
    assert [result[1:] for result in job.results[:6]] == [[rank, 6, 6] for rank in range(6)]


def test_gaps_are_filled_from_the_end(jobs: dict[str, Job]) -> None:
    job = jobs["gaps"]
    assert [job.results[rank] for rank in (0, 3, 2)] == [[1, number, 3, 3] for number in range(3)], job.output


def test_ranks_with_one_key_leave_together(jobs: dict[str, Job]) -> None:
    job = jobs["pairs"]
    assert job.ranks[0].error.startswith("RankDiscarded: rank 0 of 4 is discarded"), job.output
    assert [job.results[rank] for rank in (2, 3)] == [[1, 0, 2, 2], [1, 1, 2, 2]]


@pytest.mark.parametrize("name", ["death-of-0", "death-of-0-tcp"])
def test_rank_0_may_die_beside_which_the_store_is(jobs: dict[str, Job], name: str) -> None:
    job = jobs[name]
    assert job.ranks[0].exit_code == -signal.SIGKILL
    assert job.results[1:] == [[[0, 1, 3], [1, 0, 2]], [[0, 2, 3], [1, 1, 2]]], job.output


def test_a_rank_without_heartbeats_is_declared_dead_by_its_neighbour(jobs: dict[str, Job]) -> None:
    job = jobs["lost"]
    assert [result[:4] for result in job.results[:2]] == [[1, 2, 0, 2], [1, 2, 1, 2]], job.output
    assert "UNRESPONSIVE on rank 2" in job.output


@pytest.mark.parametrize(("name", "dead"), [("lost-host", 1), ("lost-server", 0)])
def test_all_end_at_once_when_their_store_is_gone(jobs: dict[str, Job], name: str, dead: int) -> None:
    """Also out of a collective of gloo's, whose timeout is 60 s."""
    job = jobs[name]
    assert [rank.exit_code for rank in job.ranks[:dead]] == [-signal.SIGKILL] * dead, job.output
    for rank, result in zip(job.ranks[dead:], job.results[dead:], strict=True):
        assert rank.exit_code == 0, job.output
        (error, seconds), children = result
        assert error.startswith("InternalError: the restart group's store"), error
        assert seconds < 20
        assert children == []


def test_a_rank_that_alone_has_lost_the_store_ends_and_the_others_go_on(jobs: dict[str, Job]) -> None:
    job = jobs["cut-off"]
    assert job.results[2][0][0].startswith("InternalError: the restart group's store"), job.output
    assert job.results[:2] == [[[[0, 0, 3], [1, 0, 2]], []], [[[0, 1, 3], [1, 1, 2]], []]], job.output


def test_spares_wait_and_take_over_in_rank_order(jobs: dict[str, Job]) -> None:
    job = jobs["spares"]
    assert job.ranks[1].error == "RestartAbort: rank 1 has had enough", job.output
    # Rank 2 is the spare that runs in the end; rank 3 never does.
    assert job.results[2] == ["2 of 2", [2]]
    assert job.results[3] == [None, []]
    assert job.results[0][0] == "2 of 2"


def test_a_rank_that_stops_pinging_is_interrupted(jobs: dict[str, Job]) -> None:
    job = jobs["pings"]
    assert job.results == [1, 1], job.output
    assert "SOFT_TIMEOUT on rank 1" in job.output


def test_no_standstill_counts_where_hang_protection_is_disabled(jobs: dict[str, Job]) -> None:
    job = jobs["protected"]
    assert job.results[1] == [0], job.output
    assert "SOFT_TIMEOUT" in job.output, "but afterwards"


def test_nested_calls_restart_each_their_own(jobs: dict[str, Job]) -> None:
    job = jobs["nested"]
    assert job.results == [["0.0", "0.1", "1.0"], ["0.0", "0.1", "1.0"]], job.output


def test_what_the_function_held_is_gone_when_it_starts_again(jobs: dict[str, Job]) -> None:
    job = jobs["held"]
    assert job.results == [[3, [0, 0, 0, 0], 0], [3, [0, 0, 0, 0], 0]], job.output


def test_what_is_killed_for_want_of_progress_has_its_handler_of_sigterm_and_its_grace(jobs: dict[str, Job]) -> None:
    """One that swallows every interruption for good, and one that is stopped: SIGCONT, SIGTERM, and no SIGKILL yet."""
    job = jobs["stubborn"]
    assert [rank.exit_code for rank in job.ranks] == [0, SAVED, SAVED], job.output
    assert job.results[0] == [0, 1]


def test_the_monitor_process_writes_into_the_log_of_its_rank(jobs: dict[str, Job]) -> None:
    logs = {path.name: path.read_text() for path in jobs["stubborn"].folder.glob("monitor-*.log")}
    assert sorted(logs) == ["monitor-0.log", "monitor-1.log", "monitor-2.log"]
    assert ["shows no progress for 9 s: it is killed" in logs[name] for name in sorted(logs)] == [False, True, True]


def test_the_rank_beside_which_the_store_is_leaves_last(jobs: dict[str, Job]) -> None:
    job = jobs["host-leaves"]
    assert job.results == [["left after all others", True], [1, 2], [1, 2]], job.output


def test_each_timeout_is_that_of_its_barrier_and_ends_the_rank(jobs: dict[str, Job]) -> None:
    late, alone = jobs["completion-late"], jobs["alone"]
    assert late.ranks[0].error.startswith("BarrierTimeout: completion_barrier: 1 of 2 ranks"), late.output
    assert late.results[1] == [1, 1], "the other one goes on without it"
    assert alone.ranks[0].error.startswith("BarrierTimeout: initial_barrier: 1 of 2 ranks"), alone.output


def test_nobody_waits_for_a_rank_that_died_at_the_first_barrier(jobs: dict[str, Job]) -> None:
    job = jobs["death-at-first-barrier"]
    assert job.ranks[2].exit_code == -signal.SIGKILL
    assert job.results[:2] == [[0, 2], [1, 2]], job.output
    assert "not all ranks have said that they need it no more" not in job.output, "nor for its word at the end"


def test_a_monitor_process_that_fails_says_so(jobs: dict[str, Job]) -> None:
    job = jobs["monitor-fails"]
    assert job.results == [[1, 2], [1, 2]], job.output
    assert "MONITOR_PROCESS_EXCEPTION on rank 1" in job.output

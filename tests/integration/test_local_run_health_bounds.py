"""Checks that hang or come late: each is bounded, none holds up the agent's loop, and what was started is ended."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_elastic.agent import health, health_checks
from hpc_elastic.agent.health import RoomFacts, SharedFacts
from hpc_elastic.agent.health_checks import HealthChecks, HealthSite
from hpc_elastic.agent.part import HealthVerdict
from hpc_elastic.base.clock import SystemClock
from hpc_elastic.base.loop import wait_readable
from hpc_elastic.run.option_values import Check
from hpc_elastic.workers import tree
from hpc_elastic.workers.spawn import Inherited
from hpc_elastic.workers.user_command import TOKEN_VARIABLE
from tests.rigs.agent_stand_in import run_stand_in
from tests.rigs.waiting import until

PATIENCE = 60.0


@pytest.fixture
def answers() -> Iterator[threading.Event]:
    """Set at the end: what hangs in a test hangs no longer."""
    event = threading.Event()
    yield event
    event.set()


def make(tmp_path: Path, command: str = "", *, seconds: float = 10.0, **limits: float) -> HealthChecks:
    site = HealthSite(
        limits={Check(name): limit for name, limit in limits.items()},
        command=("sh", "-c", command) if command else (),
        command_seconds=seconds,
        environ={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=str(tmp_path),
        probe=tmp_path / "health" / "node-0",
        addresses=("10.0.0.1",),
        inherited=Inherited(umask=0o022, core_limit=(0, 0), subreaper=False),
    )
    return HealthChecks(site, clock=SystemClock())


def answer(checks: HealthChecks, last_round: int = -1) -> HealthVerdict:
    began = time.monotonic()
    checks.on_join(last_round)
    assert time.monotonic() - began < 10.0, "nothing is waited for"
    wait_readable(checks.watched(), PATIENCE)
    verdict = checks.take()
    assert verdict is not None
    assert checks.take() is None
    return verdict


def marked(tmp_path: Path) -> list[tree.Proc]:
    """What a check of this test has started, and is still there."""

    def is_ours(proc: tree.Proc, environ: tree.Environ) -> bool:
        return environ.get(TOKEN_VARIABLE) is not None and environ.get("TMPDIR") == str(tmp_path)

    return [proc for proc in tree.own_processes_where(is_ours) if not proc.is_dead]


def test_a_dead_mount_is_a_reason_and_the_others_answers_are_kept(
    tmp_path: Path, answers: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(path: Path, clock: object) -> SharedFacts:
        answers.wait(PATIENCE)
        return SharedFacts(path=str(path))

    monkeypatch.setattr(health_checks, "measure_shared", hang)
    checks = make(tmp_path, shared=0.3, tmp=1)
    verdict = answer(checks)
    where = f"the run directory's filesystem ({tmp_path / 'health'})"
    assert verdict.reason == f"health check failed: {where} has not answered for 0.3 s"
    assert verdict.checks == ("shared",)
    checks.close()
    assert checks.is_stuck
    answers.set()
    until(lambda: not checks.is_stuck)


def test_an_agent_that_can_open_no_file_does_not_blame_the_run_directory() -> None:
    """It looks again after a moment; and where that has passed, it is fit."""
    facts = run_stand_in(
        """
        import pathlib, tempfile
        from hpc_elastic.run.option_values import Check
        from hpc_elastic.agent.health_checks import HealthChecks, HealthSite
        from hpc_elastic.base.loop import wait_readable
        probe = pathlib.Path(tempfile.mkdtemp()) / "health" / "node-0"
        checks = HealthChecks(
            HealthSite(
                limits={Check.SHARED: 10.0, Check.MEMORY: 1, Check.CLOCK: 60},
                environ=dict(os.environ), probe=probe, inherited=inherited), clock=clock)
        def verdict():
            checks.on_join(-1)
            wait_readable(checks.watched(), 20)
            return checks.take()
        before = verdict()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        hoard = []
        try:
            while True:
                hoard.append(os.dup(0))
        except OSError:
            pass
        began = time.monotonic()
        found = verdict()
        seconds = time.monotonic() - began
        for fd in hoard:
            os.close(fd)
        after = verdict()
        report(before=before.reason, found=found.reason, checks=found.checks, seconds=seconds, after=after.reason)
        """
    )
    assert facts["found"] == (
        "health check failed: the agent can open no file, wherever it lies: "
        "open files: an agent may have 64 (ulimit -Hn)"
    )
    assert facts["checks"] == ["descriptors"]
    assert facts["seconds"] >= health_checks.AGAIN_SECONDS
    assert (facts["before"], facts["after"]) == ("", "")


def test_a_clock_that_can_t_be_compared_is_no_reason(
    tmp_path: Path, answers: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "CHECK_SECONDS", 0.2)

    def hang(path: Path, clock: object) -> SharedFacts:
        answers.wait(PATIENCE)
        return SharedFacts(path=str(path))

    monkeypatch.setattr(health_checks, "measure_shared", hang)
    assert answer(make(tmp_path, clock=60)).is_healthy


def test_a_lack_that_passes_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_checks, "AGAIN_SECONDS", 0.05)
    looks: list[str] = []

    def room(path: str) -> RoomFacts:
        looks.append(path)
        return RoomFacts(path=path, free=0 if len(looks) == 1 else 100)

    monkeypatch.setattr(health_checks, "measure_room", room)
    assert answer(make(tmp_path, tmp=50)).is_healthy
    assert looks == [str(tmp_path)] * 2
    looks.clear()
    assert not answer(make(tmp_path, tmp=500)).is_healthy


def test_a_link_counts_from_when_it_was_seen_and_may_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_checks, "AGAIN_SECONDS", 0.01)
    seen: list[list[tuple[str, bool]]] = []
    monkeypatch.setattr(health_checks, "links", lambda addresses: seen.pop(0) if len(seen) > 1 else seen[0])
    checks = make(tmp_path, link=0.05)
    seen[:] = [[("eth0", False)]]
    assert answer(checks).is_healthy, "its driver may not be able to tell"
    seen[:] = [[("eth0", True)]]
    assert answer(checks).is_healthy
    seen[:] = [[("eth0", False)], [("eth0", False)], [("eth0", True)]]
    assert answer(checks).is_healthy, "it was gone for a moment"
    seen[:] = [[("eth0", False)]]
    verdict = answer(checks)
    assert verdict.reason == "health check failed: the network has no link (eth0), looked at for 0.05 s"
    assert verdict.checks == ("link",)


def test_a_defect_of_a_check_is_no_fault_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str) -> RoomFacts:
        raise RuntimeError("oops")

    monkeypatch.setattr(health_checks, "measure_room", broken)
    verdict = answer(make(tmp_path, tmp=50))
    assert verdict.is_healthy
    assert "oops" in verdict.warnings["tmp"]


def test_a_warning_is_given_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        health_checks, "measure_shared", lambda path, clock: SharedFacts(path="/s", error="full", is_full=True)
    )
    checks = make(tmp_path, shared=5)
    assert answer(checks).warnings == {"shared": "/s is full: full"}
    assert answer(checks).warnings == {}


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("true", ""),
        ("echo first >&2; printf 'a\\033[31m b \\n\\n' >&2; exit 1", "a?[31m b"),
        ("exit 7", "sh ended with exit code 7"),
        ("kill -SEGV $$", "sh ended with signal 11"),
        ("yes fine | head -c 3000000; echo the end >&2; exit 1", "the end"),
    ],
)
def test_a_script_s_answer(tmp_path: Path, command: str, reason: str) -> None:
    verdict = answer(make(tmp_path, command))
    assert verdict.reason == (f"health check failed: {reason}" if reason else "")


def test_a_script_that_is_not_there_is_a_reason(tmp_path: Path) -> None:
    checks = make(tmp_path)
    checks._site = replace(checks._site, command=("/no/such/check",))
    assert "/no/such/check" in answer(checks).reason


@pytest.mark.parametrize("ends", [True, False])
def test_nothing_that_a_script_started_outlives_it(tmp_path: Path, ends: bool) -> None:
    daemon = "(setsid sh -c 'trap \"\" TERM HUP; echo $$ > daemon; sleep 1000' &)"
    wait = "while [ ! -s daemon ]; do sleep 0.01; done"
    checks = make(
        tmp_path, f"sleep 1000 & {daemon}; {wait}; {'exit 0' if ends else 'sleep 1000'}", seconds=15.0 if ends else 2.0
    )
    verdict = answer(checks)
    assert verdict.is_healthy is ends
    checks.close()
    assert int((tmp_path / "daemon").read_text()) > 0
    assert marked(tmp_path) == []
    assert checks.pids == frozenset()


def test_close_ends_what_runs(tmp_path: Path) -> None:
    checks = make(tmp_path, "echo > started; sleep 1000", seconds=1000)
    checks.on_join(0)
    assert len(checks.pids) == 1
    until((tmp_path / "started").exists)
    assert len(marked(tmp_path)) >= 1
    checks.close()
    assert marked(tmp_path) == []
    assert checks.take() is None


def test_each_begin_has_its_answer(tmp_path: Path, answers: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that has answered may still be there when the next look begins: that look is another one."""
    checks = make(tmp_path, tmp=1)
    put = checks._verdicts.put

    def put_and_stay(verdict: HealthVerdict) -> None:
        put(verdict)
        answers.wait(PATIENCE)

    monkeypatch.setattr(checks._verdicts, "put", put_and_stay)
    for last_round in (-1, 0):
        checks.on_join(last_round)
        wait_readable(checks.watched(), PATIENCE)
        assert checks.take() is not None

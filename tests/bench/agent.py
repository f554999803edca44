"""What an agent costs and how fast it is: asleep, at a failure, at its own start, and over many restarts."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.bench.systems import ROOT
from tests.bench.table import Number
from tests.rigs.local_run import LocalRun
from tests.rigs.many_restarts import restart
from tests.rigs.processes import cost, deaths_of, guardian_of, resident_mb

_SLEEPER = ["--no-python", "sh", "-c", "touch $LOCAL_RUN_STAGE/$RANK.$TORCHELASTIC_RESTART_COUNT.$$; exec sleep 1000"]
_STUBBORN = ["--no-python", "sh", "-c", f"trap '' TERM; {_SLEEPER[-1]}"]
_FIRST_LOOK = ["--no-python", "sh", "-c", f"cat /proc/$PPID/task/*/schedstat > $LOCAL_RUN_STAGE/cost; {_SLEEPER[-1]}"]
_GRACE = 1.0
_COMPILED: dict[str, str] = {}


def measure(*, quick: bool) -> list[Number]:
    """Three minutes; 30 s where `quick`."""
    with tempfile.TemporaryDirectory(prefix="bench-") as cache:
        # Compiled, as an installation is: with PYTHONDONTWRITEBYTECODE each agent would compile all, and grow by it.
        _COMPILED.update(PYTHONDONTWRITEBYTECODE="", PYTHONPYCACHEPREFIX=cache)
        numbers = [*_start(5 if quick else 15)]
        numbers += _asleep(nodes=2, after=2.0 if quick else 60.0, seconds=4.0 if quick else 40.0)
        numbers += _failures(rounds=3 if quick else 9)
        numbers += _stubborn(rounds=1 if quick else 3)
        numbers += _restarts(*((60, 20) if quick else (1000, 100)))
    return numbers


def _start(repetitions: int) -> Iterator[Number]:
    env = {**os.environ, **_COMPILED, "PYTHONPATH": str(ROOT)}

    def seconds(code: str) -> float:
        """Of CPU: one thread, and on a machine that does nothing else the same as by the wall clock."""
        process = subprocess.Popen([sys.executable, "-c", code], env=env)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise AssertionError(f"python -c {code!r} ended with {process.returncode}")
        return usage.ru_utime + usage.ru_stime

    # The end of the interpreter, which has more to free in one than in the other, is no part of a start.
    bare = "import os; {}os._exit(0)"
    agent, bare = bare.format("import hpc_elastic.agent.main; "), bare.format("")
    for code in (agent, bare):
        seconds(code)
    pairs = [(seconds(agent), seconds(bare)) for _ in range(repetitions)]
    yield Number(
        title="start → imported all, by how often the start of a bare Python fits in",
        unit="×",
        values=[ours / theirs for ours, theirs in pairs],
        goal=10.0,
        note=f"{statistics.median(ours for ours, _ in pairs) * 1000:.0f} ms of CPU here",
    )
    yield Number(
        title="start → its worker runs: CPU of all its threads",
        unit="ms",
        values=[_cost_until_a_worker_runs() for _ in range(repetitions)],
        goal=150.0,
    )


def _cost_until_a_worker_runs() -> float:
    """Milliseconds: imports, rendezvous, health checks, the folders, the fork. The worker itself looks, first thing."""
    with _run(1, 1, _FIRST_LOOK) as run:
        _workers(run, 0, 1)
        told = (run.stage / "cost").read_text().splitlines()
    return sum(int(line.split()[0]) for line in told) / 1e6


@contextmanager
def _run(nodes: int, nproc: int, command: Sequence[str], *options: str) -> Iterator[LocalRun]:
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        arguments = ["--max-restarts", "100", "--max-same-failures", "0", *options]
        run = LocalRun(
            Path(folder), "", nodes=nodes, nproc=nproc, interpreter=command, options=arguments, heartbeat_ttl=20.0,
            environ=_COMPILED,
        )  # fmt: skip
        run.__enter__()
        try:
            yield run
        finally:
            run.__exit__(RuntimeError)


def _workers(run: LocalRun, round_index: int, count: int) -> dict[int, int]:
    """Rank → pid, of a round that has begun everywhere."""

    def found() -> list[list[str]]:
        return [path.name.split(".") for path in run.stage.glob(f"*.{round_index}.*")]

    run.until(lambda: len(found()) == count, f"{count} workers in round {round_index}")
    return {int(rank): int(pid) for rank, _, pid in found()}


def _asleep(*, nodes: int, after: float, seconds: float) -> Iterator[Number]:
    """`after`: its looks at a young round's sockets and counts become rare by then."""
    with _run(nodes, 8, _SLEEPER) as run:
        _workers(run, 0, 8 * nodes)
        time.sleep(after)
        agents = [run.agent(node).pid for node in range(nodes)]
        guardians = [guardian_of(agent) for agent in agents]
        before, began = {pid: cost(pid) for pid in (*agents, *guardians)}, time.monotonic()
        time.sleep(seconds)
        passed = time.monotonic() - began
        spent = {}
        for pid, then in before.items():
            now = cost(pid)
            spent[pid] = tuple((now[at] - then[at]) / passed for at in range(2))
        memory = [resident_mb(pid) for pid in agents]
    first, *others = zip(agents, guardians, strict=True)
    for title, pairs in (
        ("asleep since a minute, 8 workers: CPU", others),
        ("the same, where it coordinates 2 nodes", [first]),
    ):
        yield Number(
            title=title,
            unit="% of a core",
            values=[100 * (spent[agent][0] + spent[guardian][0]) for agent, guardian in pairs],
            goal=0.1,
            note=", ".join(
                f"agent {100 * spent[agent][0]:.3f} with {spent[agent][1]:.1f} wake-ups a second, "
                f"guardian {100 * spent[guardian][0]:.3f} with {spent[guardian][1]:.1f}"
                for agent, guardian in pairs
            ),
        )
    yield Number(title="resident, with 8 workers", unit="MB", values=memory, goal=32.0)


def _failures(rounds: int) -> Iterator[Number]:
    """8 agents with a worker each: when the agent hears of its worker's death, and when all others have ended."""
    nodes, heard, ended = 8, [], []
    with _run(nodes, 1, _SLEEPER) as run:
        for index in range(rounds):
            workers = _workers(run, index, nodes)
            victim = workers[index * 3 % nodes]
            with deaths_of(pid for pid in workers.values() if pid != victim) as deaths:
                killed, began = time.time_ns(), time.monotonic()
                os.kill(victim, signal.SIGKILL)
                moments = deaths(30)
            if len(moments) < nodes - 1:
                raise AssertionError(f"{nodes - 1 - len(moments)} workers have not ended after 30 s")
            ended.append(max(moments.values()) - began)
            _workers(run, index + 1, nodes)
            told = run.until(
                lambda now=index: [
                    e for e in run.events("workers_stopping") if e["round"] == now and "SIGKILL" in e["reason"]
                ],
                "the stop",
            )
            heard.append((min(event["t"] for event in told) - killed) / 1e6)
    yield Number(title="a worker's death → its agent acts on it", unit="ms", values=heard, goal=20.0)
    yield Number(title="a worker's death → all workers of 8 agents ended", unit="s", values=ended, goal=0.3)


def _stubborn(rounds: int) -> Iterator[Number]:
    with _run(1, 8, _STUBBORN, "--shutdown-timeout", f"{_GRACE:g}") as run:
        for index in range(rounds):
            os.kill(_workers(run, index, 8)[index % 8], signal.SIGKILL)
        _workers(run, rounds, 8)
        stops = run.until(lambda: (all_ := run.events("workers_stopped"))[rounds - 1 :] and all_, "all stops")
        found = [event["seconds"] - _GRACE for event in stops]
    yield Number(title="stop of 8 workers that ignore SIGTERM, beyond the grace", unit="s", values=found, goal=0.2)


def _restarts(rounds: int, warm: int) -> Iterator[Number]:
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        found = restart(Path(folder), rounds=rounds, warm=warm, environ=_COMPILED)
    early, late = found.early, found.late
    yield Number(
        title=f"a restart, of {rounds} in one agent",
        unit="s",
        values=[found.seconds_each],
        note=f"{early.descriptors} → {late.descriptors} descriptors, {early.threads} → {late.threads} threads, "
        f"{early.resident:.1f} → {late.resident:.1f} MB",
    )
    yield Number(title="what it grows by, per restart", unit="KiB", values=[found.kib_each], goal=4.0)
    yield Number(title="files per round in the run directory", unit="files", values=[found.files_each], goal=10.0)

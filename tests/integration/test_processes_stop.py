"""Stopping real process trees: nothing is left of the group, and nothing else is touched."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.rigs.agent_stand_in import run_stand_in

DAEMON_THAT_HEEDS_TERM = """
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    time.sleep(600)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("code", "grace", "exitcode", "killed"),
    [
        pytest.param("ENDS_ON_TERM", 30, -15, 0, id="who ends on TERM is gone at once"),
        pytest.param("IGNORES_TERM", 0.5, -9, 1, id="who ignores TERM is killed after the grace"),
        pytest.param("FORKS_AND_EXITS", 0.5, 0, 1, id="what a worker left behind is ended"),
        pytest.param("DAEMON", 0.5, -15, 1, id="so is a daemon"),
        pytest.param(repr(DAEMON_THAT_HEEDS_TERM), 30, -15, 0, id="a daemon that heeds TERM needs no kill"),
    ],
)
def test_a_group_is_stopped_with_all_that_it_started(code: str, grace: float, exitcode: int, killed: int) -> None:
    facts = run_stand_in(
        f"""
        workers = [start({code}) for _ in range(2)]
        said = [read_line(worker.stdout_fd) for worker in workers]
        strays = [int(word) for word in said if word.isdigit()]
        assert all(map(is_alive, strays))
        result = stop_group(workers, grace={grace})
        report(codes=[result.exits[w.pid].exitcode for w in workers], killed=result.killed, left=len(result.left),
               alive=any(map(is_alive, strays)), children=tree.children(os.getpid()), seconds=result.seconds)
        """
    )
    seconds = facts.pop("seconds")
    assert facts == {"codes": [exitcode] * 2, "killed": 2 * killed, "left": 0, "alive": False, "children": []}
    assert (0.5 if killed else 0.0) <= seconds < 10, "the grace is 30 s where nobody is killed"


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGSTOP)", "os.killpg(0, signal.SIGSTOP)"])
def test_stopped_worker_gets_its_term(how: str) -> None:
    facts = run_stand_in(
        f"""
        worker = start('''
            def goodbye(*_):
                os._exit(11)
            signal.signal(signal.SIGTERM, goodbye)
            {how}
            time.sleep(600)
        ''')
        until(lambda: tree.look_at(worker.pid).state == "T")
        report(code=stop_group([worker]).exits[worker.pid].exitcode)
        """
    )
    assert facts["code"] == 11


def test_worker_that_ended_long_ago_still_has_its_children_ended() -> None:
    facts = run_stand_in(
        """
        worker = start(FORKS_AND_EXITS)
        child = int(read_line(worker.stdout_fd))
        until(worker.poll)
        other = start("pass")
        until(other.poll)
        other.release()
        other.signal_group(signal.SIGKILL)  # a released worker's group is nobody's business: must do nothing
        result = stop_now([worker, other], clock=clock)
        report(alive=is_alive(child), codes=sorted(s.exitcode for s in result.exits.values()))
        """
    )
    assert facts == {"alive": False, "codes": [0, 0]}


def test_helpers_are_left_alone() -> None:
    """The guardian and the store host by pid, with what they started; and what runs in the agent's own session."""
    facts = run_stand_in(
        """
        store_host = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE,
                                      start_new_session=True)
        below = int(store_host.stdout.readline())
        command = subprocess.Popen(["sleep", "600"])
        worker = start(IGNORES_TERM)
        read_line(worker.stdout_fd)
        result = stop_now([worker], clock=clock, excluding={store_host.pid})
        alive = [is_alive(p) for p in (store_host.pid, below, command.pid)]
        command.kill(); store_host.kill(); os.kill(below, 9)
        codes = [command.wait(), store_host.wait()]
        report(alive=alive, worker=is_alive(worker.pid), left=len(result.left), codes=codes)
        """
    )
    assert facts == {"alive": [True] * 3, "worker": False, "left": 0, "codes": [-9, -9]}


def test_one_that_sigkill_does_not_end_is_reported_and_left() -> None:
    """No test can make a real D state; here SIGKILL doesn't reach one of two workers."""
    facts = run_stand_in(
        """
        workers = [start(IGNORES_TERM) for _ in range(2)]
        for worker in workers:
            read_line(worker.stdout_fd)
        stuck = workers[0].pid
        really_kill, really_killpg = tree.kill_safely, os.killpg
        tree.kill_safely = lambda proc, sig: tree.Delivery.SENT if proc.pid == stuck else really_kill(proc, sig)
        os.killpg = lambda pid, sig: None if pid == stuck else really_killpg(pid, sig)
        really_kill_it, os.kill = os.kill, lambda pid, sig: None if pid == stuck else really_kill_it(pid, sig)
        result = stop_now(workers, clock=clock, kill_bound=0.5)
        first = [(s.pid == stuck, s.why) for s in result.left]
        # The next group's stop is told of it and doesn't wait for it again.
        another = start(IGNORES_TERM)
        read_line(another.stdout_fd)
        again = stop_now([another], clock=clock, excluding={stuck})
        exits = sorted(s.exitcode for s in result.exits.values())
        really_kill_it(stuck, 9)
        until(lambda: workers[0].release())
        report(first=first, exits=exits, again=len(again.left),
               bounded=[0.5 <= result.seconds < 4, again.seconds < 4])  # it is 5 s where none is given
        """
    )
    first = [[True, "it did not end on SIGKILL"]]
    assert facts == {"first": first, "exits": [-9], "again": 0, "bounded": [True, True]}


def test_a_kill_cuts_the_grace_short() -> None:
    facts = run_stand_in(
        """
        worker = start(IGNORES_TERM)
        read_line(worker.stdout_fd)
        stopper = stop.GroupStopper([worker], grace=300, clock=clock)
        stopper.begin()
        stopper.step()
        stopper.kill_now()
        report(seconds=finish(stopper).seconds)
        """
    )
    assert facts["seconds"] < 30, "the grace is 300 s"


RUNTIME = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("the runtime got a signal", flush=True))
time.sleep(0.4)
if os.fork() == 0:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.execve(sys.executable, [sys.executable, "-S", "-c", SCRIPT], {**os.environ, "HPC_ELASTIC_INSIDE": "0"})
code = os.waitstatus_to_exitcode(os.wait()[1])
time.sleep(0.4)
print("cleaned up", flush=True)
sys.exit(code)
"""
"""Like podman: it stays beside the script, makes the container slowly, and takes time to end."""


def stop_runtime(script: str, *, grace: float) -> dict[str, Any]:
    """Stop a runtime before its container is there; what it printed after that, and how it ended."""
    source = f"SCRIPT = {script!r}\n{RUNTIME}"
    return run_stand_in(
        f"""
        from hpc_elastic.workers.stop import Inside
        worker = start({source!r})
        output, _ = worker.take_output()
        result = stop_group([worker], grace={grace}, inside=Inside())
        report(code=result.exits[worker.pid].exitcode, said=os.read(output, 4096).decode().split(),
               left=len(result.left), killed=result.killed, seconds=result.seconds,
               children=tree.children(os.getpid()))
        """
    )


def test_a_script_in_a_container_gets_one_term_and_its_runtime_none() -> None:
    facts = stop_runtime(
        """
import os, signal, subprocess, sys, time
def save(*_):
    print("saves", flush=True)
    subprocess.run([sys.executable, "-S", "-c", "import time; time.sleep(0.5); print('helped', flush=True)"])
    os._exit(7)
signal.signal(signal.SIGTERM, save)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
time.sleep(600)
""",
        grace=30,
    )
    assert facts["said"] == ["saves", "helped", "cleaned", "up"]
    assert (facts["code"], facts["killed"], facts["left"], facts["children"]) == (7, 0, 0, [])
    assert facts["seconds"] < 15, "the grace is 30 s"


def test_of_a_container_that_ignores_term_the_runtime_still_cleans_up() -> None:
    facts = stop_runtime("import time; time.sleep(600)", grace=1.0)
    assert facts["said"] == ["cleaned", "up"]
    assert (facts["killed"], facts["left"], facts["children"]) == (1, 0, [])


RANK_WITH_HELPER = """
def save(*_):
    print("saving", flush=True)
    time.sleep(0.5)
    print("helper lives" if os.waitpid(helper, os.WNOHANG) == (0, 0) else "helper died", flush=True)
    os._exit(0)
helper = os.fork()
if helper == 0:
    signal.signal(signal.SIGTERM, lambda *_: (print("helper got it", flush=True), os._exit(0)))
    time.sleep(600)
signal.signal(signal.SIGTERM, save)
time.sleep(0.2)
print("ready", flush=True)
time.sleep(600)
"""
"""A training script that saves on SIGTERM, and needs a data loader's worker for that."""


@pytest.mark.parametrize("shell", [False, True])
def test_what_a_rank_has_started_gets_term_when_the_rank_has_ended(shell: bool) -> None:
    """Also behind a shell: it does not get the signal, and ends with the script."""
    facts = run_stand_in(
        f"""
        code = "import os, signal, sys, time\\n" + {RANK_WITH_HELPER!r}
        argv = [sys.executable, "-S", "-c", code]
        if {shell}:
            argv = ["sh", "-c", '"$@"; exit $?', "sh", *argv]
        worker = spawn.start_worker(argv=argv, env=dict(os.environ), cwd="/", inherited=inherited, clock=clock)
        output, _ = worker.take_output()
        read_line(output)
        result = stop_group([worker])
        said = [read_line(output) for _ in range(3)]
        report(said=said, code=result.exits[worker.pid].exitcode, killed=result.killed, seconds=result.seconds)
        """
    )
    assert facts["said"] == ["saving", "helper lives", "helper got it"]
    assert (facts["code"], facts["killed"]) == (0, 0)
    assert facts["seconds"] < 10, "the grace is 30 s"


def test_what_a_rank_has_started_gets_term_before_the_grace_ends() -> None:
    facts = run_stand_in(
        f"""
        worker = start({RANK_WITH_HELPER.replace("time.sleep(0.5)", "time.sleep(600)")!r})
        output, _ = worker.take_output()
        read_line(output)
        result = stop_group([worker], grace=4)
        said = [read_line(output) for _ in range(2)]
        report(said=said, code=result.exits[worker.pid].exitcode, killed=result.killed)
        """
    )
    assert facts == {"said": ["saving", "helper got it"], "code": -9, "killed": 1}


def test_what_a_worker_that_succeeded_left_is_named_though_it_ends_at_once() -> None:
    facts = run_stand_in(
        """
        worker = start("import subprocess; subprocess.Popen(['sleep', '600']); print('started', flush=True)")
        read_line(worker.stdout_fd)
        until(worker.poll)
        result = stop_group([worker])
        report(code=result.exits[worker.pid].exitcode, orphans=result.orphans)
        """
    )
    assert facts["code"] == 0
    assert re.fullmatch(r"sleep \(pid \d+\)", facts["orphans"][0])


def test_what_outlived_its_worker_gets_five_seconds() -> None:
    """The other rank has its whole grace."""
    facts = run_stand_in(
        """
        dead = start(FORKS_AND_EXITS)
        orphan = int(read_line(dead.stdout_fd))
        until(dead.poll)
        saves = start('''
            def save(*_):
                time.sleep(7)
                os._exit(0)
            signal.signal(signal.SIGTERM, save)
            print("ready", flush=True)
            time.sleep(600)
        ''')
        read_line(saves.stdout_fd)
        stopper = stop.GroupStopper([dead, saves], grace=30, clock=clock)
        stopper.begin()
        result = finish(stopper)
        report(code=result.exits[saves.pid].exitcode, killed=result.killed, seconds=result.seconds,
               left=is_alive(orphan), orphans=result.orphans,
               sent_kill=stopper.sent_kill)
        """
    )
    assert (facts["code"], facts["killed"], facts["left"]) == (0, 1, False)
    assert not facts["sent_kill"], "a worker that SIGKILL ends meanwhile was killed by another"
    assert len(facts["orphans"]) == 1
    assert re.fullmatch(r"python\S* \(pid \d+\)", facts["orphans"][0])
    assert facts["seconds"] < 12

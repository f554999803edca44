"""Workers that multiply: fork bombs within the user's limit of processes, and processes that never stand still."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.agent_stand_in import StandIn, run_stand_in
from tests.rigs.waiting import until

_SOMEBODY = 61_234
"""A user whom nobody else is: a limit of processes counts a user's, and root has none."""
_MOST = 120

# Each goes on in a session of its own. It gives up by itself, should a failing test forget it.
_BOMB = """
trap '' TERM
[ "$(printf '%(%s)T' -1)" -gt "$END" ] && exit
setsid bash "$0" 2>/dev/null &
setsid bash "$0" 2>/dev/null &
sleep 0.02
exec bash "$0" 2>/dev/null
"""
_AGENT = """
uid, bomb = int(os.environ["SOMEBODY"]), os.environ["BOMB"]
if os.geteuid() == 0:
    os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
    linux._prctl(4, 1, 0, 0, 0)  # dumpable again, as an agent of this user would be
most = int(os.environ["MOST"])
resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
tag = tree.Tag(run_uid=os.environ["RUN"], node_key="0", agent_uid="a1")
guard = guardian.start_guardian(tag)
env = {"PATH": os.environ["PATH"], "HPC_ELASTIC_TAG": str(tag), "END": str(int(time.time()) + 40)}
worker = spawn.start_worker(argv=["bash", bomb], env=env, cwd="/", inherited=inherited, clock=clock)
until(lambda: len(tree.descendants(os.getpid())) > 60)
report()
if "STOP" in os.environ:
    result = stop_now([worker], clock=clock, excluding={guard.pid})
    report(left=len(result.left), children=len(tree.children(os.getpid())), seconds=result.seconds)
    guard.release()
else:
    time.sleep(600)
"""


def _processes_with(mark: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
            except OSError:
                continue
    return found


@pytest.fixture
def bomb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = Path(f"/tmp/hpc-elastic-bomb-{os.getpid()}")
    folder.mkdir(mode=0o755)
    path = folder / "bomb.sh"
    path.write_text(_BOMB)
    mine = len([name for name in os.listdir("/proc") if name.isdigit()])
    most = _MOST if os.geteuid() == 0 else mine + _MOST
    yield {"RUN": f"bomb{os.getpid()}", "BOMB": str(path), "SOMEBODY": str(_SOMEBODY), "MOST": str(most)}
    path.unlink()
    folder.rmdir()


@pytest.mark.parametrize("is_killed", [False, True])
def test_fork_bomb_that_has_reached_the_users_limit_is_ended(bomb: dict[str, str], is_killed: bool) -> None:
    """By the agent that stops it; by the guardian of one that was killed. Nobody but them can fork for this user."""
    with StandIn(_AGENT, env=bomb if is_killed else {**bomb, "STOP": "1"}) as agent:
        agent.report()
        if is_killed:
            agent.kill()
        else:
            facts = agent.report()
            assert facts["left"] == 0
            assert facts["children"] == 1, "the guardian"
            assert facts["seconds"] < 5
            agent.process.wait(10)
        until(lambda: _processes_with(f"HPC_ELASTIC_TAG={bomb['RUN']}:") == [], what="the bomb's end")


def test_processes_that_never_stand_still_are_ended() -> None:
    """Each lives for two milliseconds and leaves another one, in a session of its own: a look is always too late."""
    facts = run_stand_in(
        """
        worker = start('''
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            end = time.monotonic() + 120
            for _ in range(40):
                if os.fork() == 0:
                    break
            else:
                print("ready", flush=True)
                os._exit(0)
            while time.monotonic() < end:
                os.setsid()
                if os.fork():
                    os._exit(0)
                time.sleep(0.002)
        ''')
        read_line(worker.stdout_fd)
        result = stop_now([worker], clock=clock, kill_bound=60)
        report(left=len(result.left), children=tree.children(os.getpid()), seconds=result.seconds)
        """
    )
    assert facts["left"] == 0
    assert facts["children"] == []
    assert facts["seconds"] < 50, "its bound is 60 s"

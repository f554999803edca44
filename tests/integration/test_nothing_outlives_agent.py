"""Agents that fail themselves: without memory or descriptors, by a defect. Nothing of theirs stays; the run goes on."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

from tests.rigs.local_run import ROOT, LocalRun

_FAMILY = """
if ROUND == 0:
    subprocess.Popen(["sh", "-c", "(setsid sleep 1000 &)"]).wait()
tell("here")
others_in_round()
if ROUND == 0:
    wait_for("never")
wait_for("end")
"""
# Python imports it in every process of the run; it does something in the first agent of node 1 alone.
_SITE = """
import os
if os.environ.get("HPC_ELASTIC_NODE_TAG", "").endswith(":1") and "HPC_ELASTIC_TAG" not in os.environ:
    flag = os.environ["CRASH_FLAG"]
    def crashes():
        if os.path.exists(flag):
            os.unlink(flag)
            raise MemoryError
    from {module} import {name} as crashing
    really = crashing.{method}
    def replacement(*args, **kwargs):
        crashes()
        return really(*args, **kwargs)
    crashing.{method} = replacement
"""


def _crashing_run(folder: Path, module: str, name: str, method: str) -> tuple[LocalRun, Path]:
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE.format(module=module, name=name, method=method))
    flag = folder / "crash"
    environ = {"PYTHONPATH": f"{site}:{ROOT}", "CRASH_FLAG": str(flag)}
    return LocalRun(folder, _FAMILY, nodes=2, environ=environ), flag


def _others_go_on(run: LocalRun) -> None:
    """Until both nodes are back, and all that node 1 ran has gone."""
    run.wait_moments("here", count=2, round_index=1)
    assert [p for p in run.processes() if p.argv[:1] == ("sleep",)] == []
    run.finish_well()
    assert {event["restarts_used"] for event in run.events("round_final")} == {0}, "it is no worker's failure"


def test_agent_without_memory_leaves_evidence_and_no_worker(tmp_path: Path) -> None:
    run, flag = _crashing_run(tmp_path, "hpc_elastic.agent.node_agent", "NodeAgent", "_handle_workers")
    with run:
        run.wait_moments("here", count=2, round_index=0)
        agent, worker = run.agent(1), run.worker(1, round_index=0)
        flag.touch()
        os.kill(agent.pid, signal.SIGCHLD)
        run.until(lambda: not agent.lives() and not run.is_alive(worker), "end of agent and worker", within=15)
        _others_go_on(run)
        (event,) = run.events("agent_failed")
        assert event["error"] == "MemoryError"
        assert event["where"].startswith("sitecustomize.py:")
        assert event["node"] == 1
        assert "error: the agent itself failed: MemoryError" in run.log()
        assert "in replacement" in run.log(), "the traceback"
        kept = json.loads(run.attempt().agent_error_file(1).read_text())
        assert "in replacement" in kept["message"]["extraInfo"]["py_callstack"]
        assert kept["hpc_elastic"]["category"] == "platform"
        assert "its agent failed: MemoryError (sitecustomize.py:" in json.dumps(run.report())


def test_thread_that_fails_takes_the_agent_along(tmp_path: Path) -> None:
    """The one that moves the output: without it workers would stand still at their next print, for ever."""
    run, flag = _crashing_run(tmp_path, "hpc_elastic.output.pump", "LogPump", "_move")
    run.script_path.write_text(run.script_path.read_text().replace('wait_for("never")', 'wait_for("print"); print(1)'))
    with run:
        run.wait_moments("here", count=2, round_index=0)
        flag.touch()
        run.say("print")
        _others_go_on(run)
        ended = [event for event in run.events("agent_ended") if event["node"] == 1 and event["role"] == "agent"]
        assert "thread 'log-pump' failed: MemoryError" in ended[0]["reason"]


def test_agent_at_its_memory_limit_goes_on_or_ends_with_all_of_its_own(tmp_path: Path) -> None:
    """A limit below what it has already: whatever it asks for that it has not yet is refused from here on."""
    with LocalRun(tmp_path, _FAMILY, nodes=2, min_nodes=1) as run:
        run.wait_moments("here", count=2, round_index=0)
        agent = run.agent(1)
        resource.prlimit(agent.pid, resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
        run.kill_worker(0, round_index=0)
        run.until(lambda: [m for m in run.moments("here") if m["round"] > 0 and m["rank"] == 0], "next round")
        run.until(lambda: not agent.lives(), "end of an agent that can do nothing")
        run.until(lambda: any(event["group_world_size"] == 2 for event in _later(run)), "round of both")
        assert [p for p in run.processes() if p.argv[:1] == ("sleep",)] == []
        run.finish_well()


def _later(run: LocalRun) -> list[dict[str, Any]]:
    return [event for event in run.events("round_final") if event["round"] > 0]


def test_agent_without_descriptors_says_so_and_can_start_again_later(tmp_path: Path) -> None:
    """Enough for its own files, too few for a new round's workers."""
    with LocalRun(tmp_path, _FAMILY, nodes=2, options=["--max-restarts", "100"]) as run:
        run.wait_moments("here", count=2, round_index=0)
        agent = run.agent(1)
        before = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (_highest(agent.pid) + 1, before[1]))
        old = run.worker(1, round_index=0)
        run.kill_worker(0, round_index=0)
        # "Too many open files" alone may come first from the heartbeat, while the old worker is still being stopped.
        run.until(lambda: "open files: an agent may have" in run.log(), "message that names the limit")
        assert not run.is_alive(old)
        assert "ulimit -Hn" in run.log()
        resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, before)
        run.until(lambda: {m["rank"] for m in run.moments("here") if m["round"] > 0} == {0, 1}, "workers of both")
        run.finish_well()


def _highest(pid: int) -> int:
    return max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))

"""Faults of the fork server: modules that can't be shared, and a server that dies, hangs, or lags behind the files."""

from __future__ import annotations

import json
import os
import signal
import time
import venv
from pathlib import Path

import pytest

from hpc_elastic.agent.fork_server import ServerState
from hpc_elastic.run.spec import preload_for
from tests.rigs.local_run import LocalRun
from tests.rigs.memory_limit import memory_limit
from tests.rigs.start_methods import Starter, finish
from tests.rigs.waiting import until


def test_where_nothing_can_be_shared_workers_are_started_fresh(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\nos.abort()")
    with Starter(tmp_path, script="", preload=("mine",)) as starter:
        starter.server.start()
        starter.until(ServerState.FAILED)
        assert starter.server.fork_workers([{}]) == [None]
        assert "nothing is left to preload: mine: the fork server ended with SIGABRT" in starter.server.why_fresh
        assert starter.events[-1].subject == "fork_server_gave_up"


@pytest.mark.parametrize("python", ["true", "false", "/no/such/python", "sh"])
def test_an_interpreter_that_does_not_read_the_servers_file_never_runs_the_script(python: str, tmp_path: Path) -> None:
    with Starter(tmp_path, script="open('ran', 'w')") as starter:
        starter.command[0] = python
        starter.server._launch.argv[0] = python  # type: ignore[index]
        starter.server.start()
        starter.until(ServerState.FAILED)
    assert not (tmp_path / "ran").exists()


def test_an_isolated_interpreter_gets_no_server_and_never_runs_the_script(tmp_path: Path) -> None:
    import sys

    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -E "$@"\n')
    wrapper.chmod(0o755)
    with Starter(tmp_path, script="open('ran', 'w')") as starter:
        starter.server._launch.argv[0] = str(wrapper)  # type: ignore[index]
        starter.server.start()
        starter.until(ServerState.FAILED)
        assert "ended" in starter.server.why_fresh or "fork servers in a row" in starter.server.why_fresh
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os\nIS_FIRST = os.environ.get('RANK') == '0'", "it reads RANK"),
        (
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
            "it starts a thread",
        ),
        ("import socket\nSOCKET = socket.socket()", "it opens a socket"),
    ],
)
def test_a_sitecustomize_that_cannot_be_shared_means_no_server(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "sitecustomize.py").write_text(text)
    with Starter(tmp_path, script="", environ={"PYTHONPATH": str(tmp_path / "libs")}) as starter:
        starter.server.start()
        starter.until(ServerState.FAILED)
        assert starter.server.why_fresh == f"there is no fork server: sitecustomize can't be shared: {reason}" + (
            ", which differ between workers" if "RANK" in reason else ""
        )
        assert len([event for event in starter.events if event.subject == "fork_server_gave_up"]) == 1


def test_a_sitecustomize_that_can_be_shared_is_the_workers(tmp_path: Path) -> None:
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "sitecustomize.py").write_text("import os; os.environ['SITE'] = 'here'")
    (tmp_path / "train.py").write_text("import os, sitecustomize; print(sitecustomize.__file__, os.environ['SITE'])")
    with Starter(tmp_path, environ={"PYTHONPATH": str(tmp_path / "libs")}) as starter:
        starter.ready()
        fresh, forked = starter.both(RANK="1")
    assert fresh.stdout == forked.stdout == f"{tmp_path / 'libs' / 'sitecustomize.py'} here\n"


def test_a_wrapper_of_the_interpreter_is_followed(tmp_path: Path) -> None:
    import sys

    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexport WRAPPED=1\nexec {sys.executable} -X dev "$@"\n')
    wrapper.chmod(0o755)
    with Starter(tmp_path, script="import sys, os; print(sys.flags.dev_mode, os.environ['WRAPPED'])") as starter:
        starter.command[0] = str(wrapper)
        starter.server._launch.argv[0] = str(wrapper)  # type: ignore[index]
        starter.ready()
        fresh, forked = starter.both()
    assert fresh.stdout == forked.stdout == "True 1\n"


def test_a_server_that_dies_is_replaced(tmp_path: Path) -> None:
    with Starter(tmp_path, script="print('here')") as starter:
        starter.ready()
        first = starter.server.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: (starter.server.handle(), starter.server.pid != first)[1], "another server")
        assert not starter.server.holds_start or starter.server.state is ServerState.IMPORTING
        starter.until(ServerState.READY)
        assert finish(starter.fork()).stdout == "here\n"
        assert "SIGKILL" in next(e for e in starter.events if e.subject == "fork_server_ended").reason


def test_a_stopped_server_costs_a_fresh_start_and_no_worker_twice(tmp_path: Path) -> None:
    with Starter(tmp_path, script="import os; open(f'ran-{os.getpid()}', 'w')") as starter:
        starter.ready()
        first = starter.server.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        began = time.monotonic()
        assert starter.server.fork_workers([starter.base] * 2) == [None, None]
        assert time.monotonic() - began < 5.0
        assert "has not answered for 2 s" in starter.server.why_fresh
        assert starter.server.pid != first
        starter.until(ServerState.READY)
        assert finish(starter.fork()).status.exitcode == 0
    assert len(list(tmp_path.glob("ran-*"))) == 1


def test_a_worker_that_was_given_up_at_its_gate_never_runs(tmp_path: Path) -> None:
    """Between fork and setsid, and after it: whatever happened to the server, the gate is shut."""
    (tmp_path / "slow.py").write_text("import os, time\nos.register_at_fork(after_in_child=lambda: time.sleep(2.5))")
    with Starter(tmp_path, script="open('ran', 'w')", preload=("slow",)) as starter:
        starter.ready()
        assert starter.server.fork_workers([starter.base]) == [None]
        starter.server.close()
        until(lambda: not _forks(), "end of what was forked")
    assert not (tmp_path / "ran").exists()


def _forks() -> list[str]:
    """Children of this process, ended ones aside, that would run the script."""
    pid = os.getpid()
    names = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [name for name in names if _leads(name)]


def _leads(name: str) -> bool:
    try:
        return b"train.py" in Path(f"/proc/{name}/cmdline").read_bytes()
    except OSError:
        return False


def test_a_file_that_changed_since_its_import_is_imported_again(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("VALUE = 'old'")
    with Starter(tmp_path, script="import mine; print(mine.VALUE)", preload=("mine",)) as starter:
        starter.ready()
        assert finish(starter.fork()).stdout == "old\n"
        mine.write_text("VALUE = 'newer'")
        assert starter.server.fork_workers([starter.base]) == [None]
        assert f"{mine} has changed since it was imported" in starter.server.why_fresh
        starter.until(ServerState.READY)
        assert finish(starter.fork()).stdout == "newer\n"


def test_a_project_that_is_a_virtual_environment_itself_has_its_files_watched(tmp_path: Path) -> None:
    venv.create(tmp_path, symlinks=True)  # as `python -m venv .` does: all files are below sys.prefix
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("from mine import model")
    model = tmp_path / "mine" / "model.py"
    model.write_text("VALUE = 'old'")
    (tmp_path / "train.py").write_text("import mine.model; print(mine.model.VALUE)")
    with Starter(tmp_path, preload=("mine",), python=str(tmp_path / "bin" / "python")) as starter:
        starter.ready()
        assert finish(starter.fork()).stdout == "old\n"
        model.write_text("VALUE = 'newer'")
        assert starter.server.fork_workers([starter.base]) == [None]
        assert f"{model} has changed since it was imported" in starter.server.why_fresh


def test_what_a_module_read_of_the_environment_must_hold_for_the_worker(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\nLEVEL = os.environ.get('LEVEL', '')")
    (tmp_path / "train.py").write_text("import mine; print(mine.LEVEL)")
    with Starter(tmp_path, preload=("mine",), environ={"LEVEL": "1"}) as starter:
        starter.ready()
        assert finish(starter.fork()).stdout == "1\n"
        assert starter.server.fork_workers([{**starter.base, "LEVEL": "2"}]) == [None]
        assert "mine reads LEVEL when it is imported" in starter.server.why_fresh


def test_what_workers_import_is_learned_and_kept_for_the_next_attempt(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "lib"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("")
    (library / "late.py").write_text("")
    (library / "listens.py").write_text("import socket\nSOCKET = socket.socket()")
    (tmp_path / "neighbour.py").write_text("")
    (tmp_path / "train.py").write_text(
        "import lib, neighbour, sys, time\nprint('lib.late' in sys.modules)\n"
        "import lib.late, lib.listens, colorsys\ntime.sleep(4)"
    )
    environ = {"PYTHONPATH": str(tmp_path / "site-packages")}
    with Starter(tmp_path, preload=("json",), environ=environ, is_auto=True) as starter:
        starter.ready()
        worker = starter.server.fork_workers([{**starter.base, "GROUP_RANK": "0"}])[0]
        assert worker is not None
        until(lambda: (starter.server.handle(), "lib.listens" in starter.server.preload.left_out)[1], "the fault")
        starter.until(ServerState.READY)
        assert finish(worker).stdout == "False\n"
        assert finish(starter.fork()).stdout == "True\n"
        assert starter.server.preload.learned == ("lib", "lib.late", "lib.listens")
        until(lambda: "lib.late" in (tmp_path / "preload.json").read_text(), "preload.json")
        starter.files.settle(5.0)
    kept = preload_for(("auto",), tmp_path / "preload.json")
    assert kept.learned == ("lib", "lib.late", "lib.listens")
    assert kept.wanted == ["torch", "lib", "lib.late"]
    assert json.loads((tmp_path / "preload.json").read_text())["version"] == 1


RESTARTS = """
import decimal
tell("here", parent=os.getppid(), sid=os.getsid(0))
if ROUND == 0:
    wait_for("go")
"""
OPTIONS = ("--start-method", "forkserver", "--preload", "decimal")


def _starts(run: LocalRun) -> list[str]:
    return [event["started_fresh"] for event in run.events("workers_started")]


def test_a_killed_worker_comes_again_as_a_fork(tmp_path: Path) -> None:
    with LocalRun(tmp_path, RESTARTS, nproc=2, options=OPTIONS) as run:
        run.wait_moments("here", count=4, round_index=0)
        agents = {run.agent(node).pid for node in (0, 1)}
        assert {value["parent"] for value in run.moments("here")} == agents
        assert all(value["sid"] == value["pid"] for value in run.moments("here"))
        run.kill_worker(1, round_index=0)
        run.say("go")
        assert run.finish() == 0
        assert _starts(run) == ["", "", "", ""]
        assert len(run.events("fork_server_ready")) == 2
        assert run.report()["verdict"]["failure"]["exitcode"] == -9


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_lost_costs_the_run_nothing(number: signal.Signals, tmp_path: Path) -> None:
    with LocalRun(tmp_path, RESTARTS, options=OPTIONS) as run:
        run.wait_moments("here", count=2, round_index=0)
        agent = run.agent(0)
        servers = [
            process.pid
            for process in run.processes()
            if process.parent == agent.pid and "HPC_ELASTIC_FORK_SERVER" in process.environ
            and process.pid != run.worker(0, round_index=0)
        ]  # fmt: skip
        assert len(servers) == 1
        os.kill(servers[0], number)
        run.kill_worker(0, round_index=0)
        run.say("go")
        assert run.finish() == 0
        assert run.report()["verdict"]["failure"]["exitcode"] == -9
        if number is signal.SIGSTOP:
            assert any("has not answered" in why for why in _starts(run))
            assert "workers are started fresh: the fork server has not answered" in run.log()


def test_an_import_that_crashes_is_reported_and_the_workers_start_fresh(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\nif 'RANK' not in dict(os.environ): os.abort()")
    options = ("--start-method", "forkserver", "--preload", "mine")
    with LocalRun(tmp_path, "import mine\ntell('here')", options=options) as run:
        assert run.finish() == 0
        assert len(run.moments("here")) == 2
        assert all("SIGABRT while it imported mine" in why for why in _starts(run))
        assert "no fork server any more, workers are started fresh" in run.log()
        report = run.attempt().report_text.read_text()
        assert "workers started fresh on node0, node1: there is no fork server: " in report


def test_a_server_that_the_oom_killer_ends_costs_a_fresh_start(tmp_path: Path) -> None:
    """A real kill by the kernel, in a cgroup as a job's: the reason is given, and no worker is blamed."""
    (tmp_path / "mine.py").write_text(
        "import os\nif 'RANK' not in dict(os.environ):\n    HOARD = [b'x' * (1 << 28)] * 1"
    )
    options = ("--start-method", "forkserver", "--preload", "mine")
    run = LocalRun(tmp_path, "import mine\ntell('here')", nodes=1, options=options)
    with memory_limit(192 << 20, run):
        assert run.finish() == 0
    (why,) = _starts(run)
    assert "ended with SIGKILL, killed by the kernel for the memory limit while it imported mine" in why
    assert run.report()["verdict"]["failure"] is None


KILLS = {
    "the server": ("os.kill(os.getppid(), 9)", ""),
    "the process between": ("os.kill(os.getpid(), 9)", "the fork ended before it was a worker"),
    "the fork": ("os.kill(os.getpid(), 9)", "the fork ended before it was a worker"),
}


@pytest.mark.parametrize("name", KILLS)
def test_a_kill_between_fork_and_setsid_starts_each_worker_once(name: str, tmp_path: Path) -> None:
    """At a fork's first instruction: the server's own fork is the process between, that one's fork the worker."""
    what, reason = KILLS[name]
    generation = 2 if name == "the fork" else 1
    (tmp_path / "kills.py").write_text(
        "import os\n"
        "generation, is_armed = 0, 'RANK' not in dict(os.environ)\n"
        "def in_child():\n"
        "    global generation\n"
        "    generation += 1\n"
        f"    if is_armed and generation == {generation} and os.path.exists('armed'):\n"
        f"        {what}\n"
        "os.register_at_fork(after_in_child=in_child)\n"
    )
    script = """
    tell("here")
    if ROUND == 0:
        wait_for("go")
    """
    options = ("--start-method", "forkserver", "--preload", "kills")
    with LocalRun(tmp_path, script, nodes=1, nproc=2, options=options) as run:
        run.wait_moments("here", count=2, round_index=0)
        (tmp_path / "armed").touch()
        run.kill_worker(0, round_index=0)
        run.say("go")
        assert run.finish() == 0
        started = [[here["rank"] for here in run.moments("here", round_index=index)] for index in (0, 1)]
        assert [sorted(ranks) for ranks in started] == [[0, 1], [0, 1]]
        assert reason in _starts(run)[1]
        assert run.report()["verdict"]["failure"]["exitcode"] == -9
        if name == "the server":
            assert run.events("fork_server_ended")[0]["reason"].startswith("the fork server ended with SIGKILL")


def test_a_command_that_is_no_script_is_started_as_ever(tmp_path: Path) -> None:
    options = ("--start-method", "forkserver", "--no-python")
    with LocalRun(tmp_path, "", nodes=1, options=options, interpreter=["sh", "-c", "echo here"]) as run:
        assert run.finish() == 0
        assert "the workers run a command" in _starts(run)[0]
        assert "here" in run.log()

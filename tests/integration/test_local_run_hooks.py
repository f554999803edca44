"""What the user runs around the workers: setup, prefix, --after, notifications. By the local launcher, with kills."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import LocalRun

_TRAINS = """
tell("here")
others_in_round()
wait_for("end")
"""
_SHOWS = """
shown = ("NEW", "GONE", "LINES", "HPC_ELASTIC_RUN_DIR", "PATH", "HPC_ELASTIC_COMMAND_TOKEN")
said = subprocess.run(["bash", "-c", "greet"], capture_output=True, text=True).stdout.strip()
tell("here", env={name: os.environ.get(name) for name in shown}, said=said, python=sys.executable, cwd=os.getcwd())
"""


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def setup_file(folder: Path, text: str) -> Path:
    path = folder / "setup.sh"
    path.write_text(text)
    return path


def hooked(run: LocalRun, command: str) -> list[dict[str, Any]]:
    return [event for event in run.events("user_command_ended") if event["command"] == command]


def test_setup_gives_the_workers_its_environment_once_per_node(tmp_path: Path) -> None:
    text = f"""
        echo "$HPC_ELASTIC_NODE" >> {tmp_path}/sourced
        [ $# -eq 0 ] || {{ echo "an argument of nobody's: $1"; exit 3; }}
        trap 'rm -f {tmp_path}/nothing' EXIT
        export COLOURED=$'\001bold\002' NEW=1 LINES=$'one\\ntwo' HPC_ELASTIC_RUN_DIR=/elsewhere
        unset GONE
        greet() {{ echo hello; }}
        export -f greet
        cd /
        """
    options = ["--setup", str(setup_file(tmp_path, text))]
    with LocalRun(tmp_path, _SHOWS, nproc=2, options=options, environ={"GONE": "still here"}) as run:
        assert run.finish() == ExitCode.OK
        for moment in run.wait_moments("here", count=4):
            env = moment["env"]
            assert (env["NEW"], env["GONE"], env["LINES"], moment["said"]) == ("1", None, "one\ntwo", "hello")
            assert (env["HPC_ELASTIC_RUN_DIR"], env["HPC_ELASTIC_COMMAND_TOKEN"]) == (str(run.paths.root), None)
            assert moment["cwd"] != "/"
        assert sorted(lines(tmp_path / "sourced")) == ["0", "1"]
        assert [event["set"] for event in hooked(run, "setup")] == [
            ["BASH_FUNC_greet%%", "COLOURED", "LINES", "NEW"]
        ] * 2
        assert [event["unset"] for event in hooked(run, "setup")] == [["GONE"]] * 2


def test_the_workers_run_by_the_python_that_setup_has_put_first_on_path(tmp_path: Path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexport BY_SETUP=1\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    script = 'tell("here", by=os.environ.get("BY_SETUP"))'
    with LocalRun(tmp_path, script, nodes=1, options=["--setup", f"export PATH={python.parent}:$PATH"]) as run:
        assert run.finish() == ExitCode.OK
        assert [moment["by"] for moment in run.moments("here")] == ["1"]
        assert f"python is {python}" in run.log()


def test_a_fork_server_and_its_workers_have_the_environment_of_setup(tmp_path: Path) -> None:
    options = ["--start-method", "forkserver", "--preload", "json", "--setup", "export NEW=1; unset GONE"]
    with LocalRun(tmp_path, _SHOWS, nproc=2, options=options, environ={"GONE": "still here"}) as run:
        assert run.finish() == ExitCode.OK
        found = [(moment["env"]["NEW"], moment["env"]["GONE"]) for moment in run.wait_moments("here", count=4)]
        assert found == [("1", None)] * 4
        assert [event["started_fresh"] for event in run.events("workers_started")] == ["", ""]


def test_a_setup_that_fails_is_the_runs_failure_with_its_own_output(tmp_path: Path) -> None:
    text = "export A=1\necho loading cuda/12.9 >&2\necho 'no such module: cuda/12.9' >&2\n(exit 3)\nexport B=1\n"
    with LocalRun(tmp_path, _TRAINS, options=["--setup", str(setup_file(tmp_path, text))]) as run:
        assert run.finish() == ExitCode.NOT_RETRYABLE
        why = "--setup failed: exit code 3 from '( exit 3 )' (line 4): no such module: cuda/12.9"
        report = run.attempt().report_text.read_text()
        assert why in report
        assert "no node is to blame" in report
        assert "loading cuda/12.9" in report
        assert "[node1] error: --setup: loading cuda/12.9" in run.log()
        assert run.moments("here") == []
        assert run.events("agent_relaunched") == []
        (first, _) = run.report()["attempts"][0]["commands"]
        assert (first["command"], first["reason"]) == ("setup", why.removeprefix("--setup failed: "))
        assert first["output"] == ["loading cuda/12.9", "no such module: cuda/12.9"]


def test_a_setup_that_never_ends_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    slow = "echo licence server is asked; sleep 1000 & sleep 1000"
    with LocalRun(tmp_path, _TRAINS, nodes=1, options=["--setup", slow, "--setup-timeout", "1"]) as run:
        assert run.finish() == ExitCode.NOT_RETRYABLE
        assert "--setup failed: it had not ended after 1 s: licence server is asked" in run.log()
        run.check_nothing_left()


def test_ctrl_c_does_not_wait_for_a_setup(tmp_path: Path) -> None:
    options = ["--setup", f"echo x >> {tmp_path}/begun; sleep 1000"]
    with LocalRun(tmp_path, _TRAINS, nodes=1, options=options) as run:
        run.until(lambda: lines(tmp_path / "begun"), "a setup")
        began = time.monotonic()
        run.signal(signal.SIGINT)
        assert run.finish() == 128 + signal.SIGINT
        assert time.monotonic() - began < 20.0


def test_what_ends_a_worker_behind_a_prefix_is_the_scripts(tmp_path: Path) -> None:
    """With a wrapper that becomes the script, as numactl, and one that stays, as a profiler."""
    script = """
        tell("here", parent=open(f"/proc/{os.getppid()}/comm").read().strip(), nice=os.nice(0))
        others_in_round()
        wait_for(f"go-{ROUND}")
        if ROUND == 0 and RANK == 1:
            raise KeyError("of the script")
        if ROUND == 1 and RANK == 1:
            sys.exit(7)
        if ROUND == 2 and RANK == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        """
    prefix = """nice -n 3 bash -c '"$@"; exit $?' wrapper"""
    with LocalRun(tmp_path, script, options=["--worker-prefix", prefix, "--max-same-failures", "0"]) as run:
        for number in range(4):
            for moment in run.wait_moments("here", count=2, round_index=number):
                assert (moment["parent"], moment["nice"]) == ("bash", min(19, os.nice(0) + 3))
            run.say(f"go-{number}")
        assert run.finish() == ExitCode.OK
        failed = [event for event in run.events("worker_failed") if event["rank"] == 1]
        assert "KeyError: 'of the script'" in failed[0]["message"]
        assert [event["exitcode"] for event in failed] == [1, 7, -int(signal.SIGSEGV)]
        (spec,) = [json.loads(run.paths.run_json.read_text())["worker_prefix"][:3]]
        assert spec == ["nice", "-n", "3"]


def test_a_script_behind_a_prefix_hears_the_end_of_its_round(tmp_path: Path) -> None:
    script = """
        import signal
        def on_term(number, frame):
            tell("term")
            sys.exit(0)
        signal.signal(signal.SIGTERM, on_term)
        tell("here")
        others_in_round()
        if ROUND == 0:
            wait_for("never")
        """
    with LocalRun(tmp_path, script, options=["--worker-prefix", "env WRAPPED=1"]) as run:
        run.wait_moments("here", count=2, round_index=0)
        run.kill_worker(0, round_index=0)
        assert run.finish() == ExitCode.OK
        assert [moment["rank"] for moment in run.moments("term")] == [1]


# -- after the run, and notices --------------------------------------------------------------------------------------


def notices(folder: Path) -> list[dict[str, Any]]:
    """What ``--notify`` was given."""
    path = folder / "notices"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_after_runs_once_with_the_result_when_the_run_is_not_requeued(tmp_path: Path) -> None:
    script = """
        tell("here")
        if RANK == 1:
            raise ValueError(f"attempt {ATTEMPT}")
        wait_for("never")
        """
    after = (
        'echo "$HPC_ELASTIC_OUTCOME $HPC_ELASTIC_EXIT_CODE $HPC_ELASTIC_ATTEMPT" >> after; '
        'echo "$HPC_ELASTIC_ROOT_CAUSE" >> cause; test -f "$HPC_ELASTIC_REPORT"; echo kept; exit 4'
    )
    options = ["--max-restarts", "0", "--max-requeues", "1", "--max-same-failures", "0", "--after", after]
    options += ["--notify", "cat >> notices"]
    with LocalRun(tmp_path, script, options=options) as run:
        assert run.finish() == ExitCode.WORKERS_FAILED
        folder = Path(json.loads(run.paths.run_json.read_text())["cwd"])
        assert (folder / "after").read_text().splitlines() == ["failed 1 1"]
        assert "ValueError: attempt 1" in (folder / "cause").read_text()
        assert [(one["event"], one["attempt"]) for one in notices(folder)] == [
            ("failure", 0),
            ("requeue", 0),
            ("failure", 1),
            ("end", 1),
        ]
        end = notices(folder)[-1]
        assert (end["outcome"], end["exit_code"], end["run_id"]) == ("failed", 1, run.paths.root.name)
        assert "ValueError: attempt 1" in end["root_cause"]
        assert "ValueError: attempt 1" in end["text"]
        assert "  after        : failed: exit code 4: kept" in run.attempt(1).report_text.read_text()
        assert "ValueError: attempt 1" in run.attempt(1).report_text.read_text()
        assert run.report(1)["attempts"][1]["commands"][0]["code"] == 4


class Listener:
    """A web server of a kind, and what it was sent."""

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.bodies: list[dict[str, Any]] = []
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                listener.bodies.append(json.loads(body))
                answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/secret-token"

    def __enter__(self) -> Listener:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_a_notice_is_posted_to_a_url(tmp_path: Path) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()

    with Listener(answer) as listener, LocalRun(tmp_path, _TRAINS, options=["--notify", listener.url]) as run:
        run.wait_moments("here", count=2, round_index=0)
        run.kill_worker(0, round_index=0)
        run.wait_moments("here", count=2, round_index=1)
        run.until(lambda: listener.bodies, "a notice while the run goes on")
        run.finish_well()
        assert [body["event"] for body in listener.bodies] == ["failure", "end"]
        assert "SIGKILL" in listener.bodies[0]["text"]
        assert (listener.bodies[1]["outcome"], listener.bodies[1]["root_cause"]) != ("failed", "")


def test_a_notice_that_hangs_or_fails_is_never_in_the_way(tmp_path: Path) -> None:
    def hang(handler: BaseHTTPRequestHandler) -> None:
        for _ in range(600):  # a byte now and then: no timeout of a socket ends that
            time.sleep(0.1)
            handler.wfile.write(b"H")
            handler.wfile.flush()

    with Listener(hang) as listener, LocalRun(tmp_path, _TRAINS, options=["--notify", listener.url]) as run:
        run.say("end")
        began = time.monotonic()
        assert run.finish() == ExitCode.OK
        assert time.monotonic() - began < 45.0
        text = run.attempt().report_text.read_text()
        assert "SUCCEEDED" in text
        assert "  notify       : failed (end): it had not ended after 10 s" in text
        assert "secret-token" not in text + run.log()
        run.check_nothing_left()


def test_no_network_is_no_reason_to_fail(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _TRAINS, nodes=1, options=["--notify", "http://127.0.0.1:1/token"]) as run:
        run.finish_well()
        assert "--notify (end) failed: exit code 1: 127.0.0.1 can't be reached: [Errno 111]" in run.log()
        assert "/token" not in run.log()
        assert "around the workers: --notify http://127.0.0.1:1\n" in run.log()


def test_a_hang_is_notified(tmp_path: Path) -> None:
    script = """
        from hpc_elastic import heartbeat
        heartbeat(step=1)
        heartbeat(step=2)
        tell("here")
        if ROUND == 0:
            wait_for("never")
        """
    options = ["--section-timeouts", "step:2", "--notify", f"cat >> {tmp_path}/notices"]
    with LocalRun(tmp_path, script, nodes=1, options=options) as run:
        assert run.finish() == ExitCode.OK
        assert [one["event"] for one in notices(tmp_path)] == ["hang", "failure", "end"]

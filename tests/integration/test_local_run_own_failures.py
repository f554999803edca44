"""What of this package fails itself or can not be had, in a real run: told as that, and no node is blamed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import ROOT, LocalRun

_STAYS = """
tell("here")
others_in_round()
if ATTEMPT == 0:
    wait_for("never")
"""
# Python imports it in every process of the run; it does something in the supervisor alone, which says so itself.
_SITE = """
import sys
if "--cluster" in sys.orig_argv or "hpc_elastic" in sys.orig_argv:
    import os
    from hpc_elastic.launch.supervisor import Supervisor as crashing
    really = crashing._handle_signals
    def replacement(*args, **kwargs):
        flag = os.environ["CRASH_FLAG"]
        if os.path.exists(flag):
            os.unlink(flag)
            raise ZeroDivisionError("of the supervisor")
        return really(*args, **kwargs)
    crashing._handle_signals = replacement
"""


def _outer(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "outer.json").read_text())
    return value


def test_a_supervisor_that_fails_itself_ends_the_attempt_with_its_report_and_the_run_goes_on(tmp_path: Path) -> None:
    site, flag = tmp_path / "site", tmp_path / "crash"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE)
    environ = {
        "PYTHONPATH": f"{site}:{ROOT}",
        "CRASH_FLAG": str(flag),
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "outer.json"),
    }
    with LocalRun(tmp_path, _STAYS, nodes=2, environ=environ, options=["--max-requeues", "1"]) as run:
        run.wait_moments("here", count=2, attempt=0)
        workers = [run.worker(rank, round_index=0) for rank in (0, 1)]
        flag.touch()
        os.kill(run.supervisor(), signal.SIGCHLD)
        assert run.finish() == ExitCode.OK
        assert run.moments("here", attempt=1), "the next attempt has run"
        assert not any(map(run.is_alive, workers))
        report, text = run.report(0), run.attempt(0).report_text.read_text()
        assert report["outcome"] == "failed"
        assert report["verdict"]["category"] == "platform"
        assert "the supervisor itself failed: ZeroDivisionError: of the supervisor (sitecustomize.py:" in text
        assert "the script did not cause this" in text
        kept = json.loads(run.attempt(0).supervisor_error_file.read_text())
        assert kept["message"]["message"] == "ZeroDivisionError: of the supervisor"
        assert "in replacement" in kept["message"]["extraInfo"]["py_callstack"]
        assert kept["hpc_elastic"]["category"] == "platform"
        assert "ZeroDivisionError: of the supervisor" in _outer(tmp_path)["message"]["message"]


def test_what_no_worker_left_a_file_of_is_told_to_whoever_started_the_run(tmp_path: Path) -> None:
    """No node is fit: not one worker has been started."""
    environ = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "outer.json")}
    with LocalRun(tmp_path, "", nodes=2, environ=environ, options=["--health-check", "false"]) as run:
        assert run.finish() == ExitCode.WORKERS_FAILED
        told = _outer(tmp_path)
        assert re.match(r"node[01] left: health check failed", told["message"]["message"])
        assert told["message"]["errorCode"] == 1
        assert told["hpc_elastic"]["category"] == "infrastructure"
        assert told["hpc_elastic"]["host"] in ("node0", "node1")


_BUILDS = """
import importlib.util, pathlib
torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent  # not imported: only what builds need
spec = importlib.util.spec_from_file_location("file_baton", torch / "utils/file_baton.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
folder = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"], "fused")
folder.mkdir(parents=True, exist_ok=True)
tell("here")
if RANK == 0:
    baton = module.FileBaton(str(folder / "lock"))
    if not baton.try_acquire():
        baton.wait()
    elif ROUND == 0:
        tell("builds")
        wait_for("never")
    else:
        baton.release()
elif ROUND == 0:
    wait_for("fail")
    sys.exit(3)
"""


def test_a_build_that_the_stop_broke_off_leaves_no_lock(tmp_path: Path) -> None:
    """torch's `FileBaton`: each later start would wait for the file of the build that SIGTERM ended."""
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    with LocalRun(tmp_path, _BUILDS, nodes=1, nproc=2, environ=environ, options=("--max-restarts", "1")) as run:
        run.wait_moments("builds", count=1)
        run.say("fail")
        assert run.finish() == 0
    assert f"removed the lock file {tmp_path}/extensions/fused/lock of a C++ extension's build" in run.log()


def test_a_health_check_that_is_not_there_at_run_time_ends_the_run_and_blames_no_node(tmp_path: Path) -> None:
    """It is there at submit: the first worker's round takes it away, as `module unload` may."""
    check = tmp_path / "check.sh"
    check.write_text("#!/bin/sh\nexit 0\n")
    check.chmod(0o700)
    script = f"""
    import os
    os.path.exists({str(check)!r}) and RANK == 0 and os.unlink({str(check)!r})
    tell("here")
    others_in_round()
    raise SystemExit(3)
    """
    options = ["--health-check", str(check), "--max-requeues", "3"]
    with LocalRun(tmp_path, script, options=options) as run:
        assert run.finish() == ExitCode.NOT_RETRYABLE
        assert len(run.events("start_refused")) == 2
        assert run.events("node_left") == run.events("health_check_failed") == []
        assert {event["reason"] for event in run.events("start_refused")} == {
            f"--health-check: cannot start '{check}': there is no such file (looked from '{tmp_path}')"
        }
        text = " ".join(run.attempt().report_text.read_text().split())
        assert "train.py FAILED (exit code 93)" in text
        assert "did without : node node0 refused to start: --health-check: cannot start" in text
        assert run.events("attempt_requeued") == []

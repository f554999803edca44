"""Real workers with and without ``@record``: a failure is told once, and whoever started the run is told it too."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.agent import LocalElasticAgent, WorkerGroupFailureError, WorkerSpec
from hpc_elastic.failures import ChildFailedError, ErrorHandler, record
from hpc_elastic.rendezvous.handler import FileRendezvousHandler
from hpc_elastic.rendezvous.handler_config import config_from_url
from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import LocalRun

_TORCH = "torch.distributed.elastic.multiprocessing.errors"
_VARIANTS = {"none": "", "ours": "from hpc_elastic.failures import record", "torch": f"from {_TORCH} import record"}
_TRAINING = """
if RANK == 1:
    {0}
else:
    record = lambda function: function

def step(n):
    raise ValueError(f"bad batch {{n}}")

{1}
def main():
    print("the last words before it", file=sys.stderr, flush=True)
    step(17)

tell("here", error_file=os.environ["TORCHELASTIC_ERROR_FILE"])
others_in_round()
if RANK == 1:
    main()
wait_for("never")
"""
_NO_RESTARTS = ["--max-restarts", "0"]


def _outer(folder: Path) -> tuple[Path, dict[str, str]]:
    path = folder / "outer.json"
    return path, {"TORCHELASTIC_ERROR_FILE": str(path)}


@pytest.mark.torch
def test_a_failure_is_told_once_whoever_recorded_it(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    told: dict[str, Any] = {}
    for name, line in _VARIANTS.items():
        folder = tmp_path / name
        folder.mkdir()
        outer, environ = _outer(folder)
        script = _TRAINING.format(line or "pass", "@record" if line else "")
        with LocalRun(folder, script, options=_NO_RESTARTS, environ=environ) as run:
            assert run.finish(within=120.0) == ExitCode.WORKERS_FAILED  # torch is slow to import where others work
            evidence = json.loads(run.rank(1).error_file.read_text())
            report, text = run.report(), run.attempt().report_text.read_text()
            # One failure, of one worker.
            assert [event["rank"] for event in run.events("worker_failed")] == [1]
            assert not run.rank(0).error_file.exists()
            # Its traceback stands once in its evidence and once in each report, and what was printed beside it too.
            for where in (json.dumps(evidence), json.dumps(report["verdict"]), text):
                assert where.count("raise ValueError(") == 1, (name, where)
            own = evidence["hpc_elastic"]
            assert own["stderr_tail"] == "the last words before it"
            assert own["source"] == ("error_file" if line else "stderr")
            assert evidence["message"]["message"] == "ValueError: bad batch 17"
            assert evidence["message"]["errorCode"] == 1
            # Workers have a file of their own; the outer one gets the first failure at the end.
            for worker in run.moments("here"):
                assert worker["error_file"] == str(run.rank(worker["rank"]).error_file)
            assert json.loads(outer.read_text()) == evidence
            told[name] = (own["fingerprint"], own["failure_class"], own["category"], own["reason"], own["retryable"])
    assert told["ours"] == told["none"]
    assert told["torch"] == told["none"]


def test_a_killed_worker_is_told_to_whoever_started_the_run(tmp_path: Path) -> None:
    outer, environ = _outer(tmp_path)
    outer.write_text('{"message": "an earlier one"}')
    script = 'tell("here")\nothers_in_round()\nif RANK == 1: os.kill(os.getpid(), 9)\nwait_for("never")\n'
    with LocalRun(tmp_path, script, options=_NO_RESTARTS, environ=environ) as run:
        assert run.finish() == ExitCode.WORKERS_FAILED
        message = json.loads(outer.read_text())["message"]
        assert message["message"].startswith("Signal 9 (SIGKILL) received by PID ")
        assert message["errorCode"] == -signal.SIGKILL


def test_a_run_that_recovers_tells_nobody(tmp_path: Path) -> None:
    outer, environ = _outer(tmp_path)
    script = 'tell("here")\nothers_in_round()\nif ROUND == 0 and RANK == 1: raise ValueError("once")\n'
    with LocalRun(tmp_path, script, environ=environ) as run:
        assert run.finish() == ExitCode.OK
        assert run.rank(1).error_file.exists()
        assert run.report()["outcome"] == "succeeded"
        assert "ValueError: once" in run.attempt().report_text.read_text()
        assert not outer.exists()


def test_a_program_that_is_its_own_agent_passes_its_first_failure_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer, environ = _outer(tmp_path)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "rdzv").mkdir()
    handler = FileRendezvousHandler(config_from_url(f"fs://{tmp_path}/rdzv/run?min_workers=1&timeout=60"))
    logs = tmp_path / "logs"

    def work() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError(os.environ["TORCHELASTIC_ERROR_FILE"])
        time.sleep(60)

    class Quiet(ErrorHandler):
        def initialize(self) -> None:
            """Leave the interpreter's faulthandler as pytest set it."""

    def main() -> None:
        spec = WorkerSpec("default", 2, work, (), handler, max_restarts=0)
        try:
            LocalElasticAgent(spec, log_dir=logs, shutdown_timeout=5.0).run()
        except WorkerGroupFailureError as error:
            raise ChildFailedError("train", error.get_worker_exceptions()) from None

    with pytest.raises(ChildFailedError) as caught:
        record(main, Quiet())()
    rank, failure = caught.value.get_first_failure()
    assert rank == 1
    assert json.loads(outer.read_text()) == json.loads(Path(failure.error_file).read_text())
    # The worker's own file, below the agent's folder, was the one that it knew.
    assert json.loads(outer.read_text())["message"]["message"] == f"ValueError: {failure.error_file}"
    assert logs in Path(failure.error_file).parents

"""All workers stand still, in a script without heartbeats: suspected, and with --hangs act started again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_elastic.cli.main import main
from tests.rigs.local_run import LocalRun

SCRIPT = """
def wait_for_the_others():
    wait_for("go on")

tell("here")
others_in_round()
deadline = time.process_time() + 2
while time.process_time() < deadline:
    pass
if ROUND == 0:
    tell("waits")
    while not is_said("go on"):
        time.sleep(1)
"""


def test_a_suspicion_is_shown_and_goes_when_the_workers_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LocalRun(tmp_path, SCRIPT, options=("--hangs", "observe:3")) as run:
        run.until(lambda: run.events("hang_suspected"), "suspicion")
        assert main(["status", str(run.paths.root), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["suspicion"].startswith("no rank of 2 has made progress for ")
        assert main(["status", str(run.paths.root)]) == 0
        assert "  hangs?   : no rank of 2" in capsys.readouterr().out
        run.say("go on")
        assert run.finish() == 0
        assert "the run seems to hang: no rank of 2 has made progress for" in run.log()
        assert len(run.events("hang_suspected")) == 1


def test_a_suspicion_counts_as_a_hang_where_the_user_wants_that(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SCRIPT, options=("--hangs", "act:3")) as run:
        assert run.finish() == 0
        (suspected,) = run.events("hang_suspected")
        assert suspected["source"] == "kernel"
        assert {failed["failure_class"] for failed in run.events("worker_failed")} == {"hang"}
        assert "train.py" in str(run.events("stacks_taken"))
        assert [event["round"] for event in run.events("round_final")][-1] == 1

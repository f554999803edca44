"""All workers of a script without heartbeats stand still, or NCCL says so: suspected; by --hangs act started again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_elastic.cli.main import main
from tests.rigs.fake_ras import FakeRas
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


_LAUNCHES = """
from tests.rigs.fake_ras import FakeRas

address = os.environ.get("NCCL_RAS_ADDR", "")
tell("here", address=address, enabled=os.environ.get("NCCL_RAS_ENABLE", ""))
others_in_round()
began = time.monotonic()

def answer():
    # Both launch for 2 s; then rank 1 launches no more, until it is said to.
    count = int(10 * min(time.monotonic() - began, 2.0))
    ranks = [
        {"rank": rank, "host": "127.0.0.1", "pid": 1, "collective_counts": {"AllReduce": count - rank * BEHIND}}
        for rank in range(2)
    ]
    if is_said("go on"):
        ranks = []
    found = {"nccl_version": "2.29.1", "communicators": [{"hash": "0x1", "size": 2, "ranks": ranks}]}
    return json.dumps(found)

if RANK == 0 and SERVES:
    server = FakeRas(answer, port=int(address.rpartition(":")[2]))
while ROUND == 0 and not is_said("go on"):
    for _ in range(200_000):
        pass
time.sleep(3)
"""


def launches(*, behind: int = 1, serves: bool = True) -> str:
    return f"import json\nBEHIND, SERVES = {behind}, {serves}\n{_LAUNCHES}"


def test_a_straggler_by_nccl_is_shown_with_its_rank_and_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LocalRun(tmp_path, launches(), options=("--hangs", "observe:3")) as run:
        run.until(lambda: run.events("hang_suspected"), "suspicion")
        assert main(["status", str(run.paths.root), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)["suspicion"]
        assert shown.startswith("NCCL has made no progress for ")
        assert shown.endswith("rank 1 on node1 has launched AllReduce up to #19, 1 other up to #20")
        run.say("go on")
        assert run.finish() == 0
        (event,) = run.events("hang_suspected")
        assert (event["source"], event["ranks"]) == ("nccl", [1])
        assert "the run seems to hang: NCCL has made no progress" in run.log()
        assert "the workers go on" in run.log()
        addresses = [moment["address"] for moment in run.moments("here")]
        assert len(set(addresses)) == 2  # each agent's own


def test_it_counts_as_a_hang_where_the_user_wants_that(tmp_path: Path) -> None:
    with LocalRun(tmp_path, launches(), options=("--hangs", "act:3")) as run:
        assert run.finish() == 0
        assert [event["source"] for event in run.events("hang_suspected")] == ["nccl"]
        assert {failed["failure_class"] for failed in run.events("worker_failed")} == {"hang"}
        assert [event["round"] for event in run.events("round_final")][-1] == 1


def test_a_hang_of_all_that_may_be_a_rest_is_never_acted_on(tmp_path: Path) -> None:
    with LocalRun(tmp_path, launches(behind=0), options=("--hangs", "act:3")) as run:
        run.until(lambda: run.events("hang_suspected"), "suspicion")
        run.say("go on")
        assert run.finish() == 0
        assert "none for " in run.events("hang_suspected")[0]["reason"]
        assert not run.events("worker_failed")


def test_a_user_s_own_address_wins(tmp_path: Path) -> None:
    with FakeRas(lambda: '{"communicators": []}') as server:
        environ = {"NCCL_RAS_ADDR": f"localhost:{server.address[1]}"}
        with LocalRun(tmp_path, launches(serves=False), options=("--hangs", "observe:3"), environ=environ) as run:
            run.until(lambda: server.asked, "question")
            run.say("go on")
            assert run.finish() == 0
            assert {moment["address"] for moment in run.moments("here")} == set(environ.values())


def test_a_user_who_wants_no_ras_gets_none(tmp_path: Path) -> None:
    environ = {"NCCL_RAS_ENABLE": "0"}
    with LocalRun(tmp_path, launches(serves=False), options=("--hangs", "observe:3"), environ=environ) as run:
        run.say("go on")
        assert run.finish() == 0
        assert {moment["address"] for moment in run.moments("here")} == {""}

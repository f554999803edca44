"""What is missing on one node and not on the others: the node is left out and the run goes on, or is tried again."""

from __future__ import annotations

from pathlib import Path

from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import LocalRun

# Each node has a folder of its own, as /opt or /scratch on a cluster.
_READS_VOCABULARY = """
from pathlib import Path
node = os.environ["GROUP_RANK"] if ROUND == 0 else "0"
tell("here")
tokens = (Path(sys.argv[0]).parent / f"node{node}" / "vocab.txt").read_text()
tell("read")
if ROUND == 0:
    wait_for("never")
"""
_IMPORTS = """
node = os.environ["GROUP_RANK"]
sys.path.insert(0, os.path.join(os.path.dirname(sys.argv[0]), f"node{node}"))
tell("here")
import flash_attention_of_this_node
wait_for("never")
"""


def _install(folder: Path, *nodes: int) -> None:
    for node in nodes:
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "vocab.txt").write_text("a b c")
        (folder / f"node{node}" / "flash_attention_of_this_node.py").write_text("")


def test_the_round_goes_on_without_a_node_that_lacks_a_package(tmp_path: Path) -> None:
    options = ["--nodes", "1-2", "--max-restarts", "2"]
    script = _IMPORTS.replace('wait_for("never")', 'ROUND or wait_for("never")')
    with LocalRun(tmp_path, script, nproc=2, options=options) as run:
        _install(run.script_path.parent, 0)
        assert run.finish() == ExitCode.OK
        verdict = run.report()["verdict"]
        assert verdict["nodes_apart"] == ["node1"]
        assert (verdict["category"], verdict["retryable"]) == ("infrastructure", True)
        assert "the same failure on all 2 ranks of node1, and on none elsewhere" in verdict["evidence"]
        text = run.attempt().report_text.read_text()
        assert "; node1 is suspect\n" in text
        assert "not retryable" not in text
        rounds = run.report()["attempts"][0]["rounds"]
        assert [[node["host"] for node in part["nodes"]] for part in rounds] == [["node0", "node1"], ["node0"]]
        assert [part["verdict"] is None for part in rounds] == [False, True], "leaving it out is no second failure"


def test_where_the_node_is_needed_the_attempt_ends_and_another_one_may_go_well(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _READS_VOCABULARY, nproc=2, options=["--max-restarts", "0", "--max-requeues", "0"]) as run:
        _install(run.script_path.parent, 0)
        assert run.finish() == ExitCode.WORKERS_FAILED
        (closed,) = run.events("closed")
        assert closed["reason"].startswith("restarts exhausted (0 of 0 restarts used)")
        report = run.report()
        assert report["verdict"]["nodes_apart"] == ["node1"]
        assert all(event["waited"] >= 0.8 for event in run.events("worker_failed"))


def test_what_is_missing_on_all_nodes_is_not_tried_again(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _IMPORTS, nproc=2, options=["--max-restarts", "2", "--max-requeues", "2"]) as run:
        assert run.finish() == ExitCode.NOT_RETRYABLE
        assert {event["round"] for event in run.events("round_final")} == {0}
        verdict = run.report()["verdict"]
        assert (verdict["nodes_apart"], verdict["retryable"]) == ([], False)
        assert "not retryable" in run.attempt().report_text.read_text()

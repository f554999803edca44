"""A report of whatever is left: a copied run directory of which half is missing, torn, garbled or of another kind."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from hpc_elastic.base import codec
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document
from hpc_elastic.report.render_html import render_html
from hpc_elastic.report.render_text import render_text
from hpc_elastic.report.write import json_report
from hpc_elastic.run.progress import NodeHeartbeats, RankHeartbeat
from tests.rigs.run_builder import GLOO, RunBuilder, make_failure

SEEDS = range(60)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two attempts: a failure with its consequences, a lost node, a requeue, a hang, and success."""
    builder = RunBuilder(tmp_path_factory.mktemp("whole") / "run-1", nodes=4, per_node=2)
    builder.attempt(0)
    for node in range(4):
        builder.event(0, "agent", node, 1, "agent_started", pid=1, version="0.1.0")
    builder.round(0, 0, at=9)
    builder.fail(make_failure(5, at=60, exception="ValueError: bad batch 17", per_node=2, last_step=7))
    for rank in (0, 1, 2, 3):
        text = f"RuntimeError: {GLOO.format(rank=rank)}"
        builder.fail(make_failure(rank, at=60.2 + rank / 50, exception=text, per_node=2))
    builder.stopped(0, 0, at=63)
    builder.round(0, 1, at=65, reason="restart 1 of 3 (2 left) after: rank 5: ValueError: bad batch 17")
    builder.event(0, "agent", 0, 130, "node_lost", round=1, node=3, host="n4", age=30.0)
    groups = [{"ranks": [0], "stack": ["/home/ann/train.py:88 main"]}]
    builder.event(0, "agent", 0, 131, "stacks_taken", round=1, groups=groups, silent=[1], beats=[])
    builder.stopped(0, 1, at=133, without=(3,))
    builder.event(0, "supervisor", -1, 134, "agent_ended", node=3, name="n4", code=137)
    builder.end(0, at=140, outcome="failed", code=75, decision="requeue: requeue 1 of 3 (2 left): too few nodes")
    builder.attempt(1, at=500, job_id="4243")
    builder.round(1, 0, at=509)
    builder.succeeded(1, 0, at=800)
    builder.end(1, at=802, outcome="succeeded", code=0)
    beats = builder.paths.attempt(0).heartbeats(0)
    beats.parent.mkdir()
    ranks = (RankHeartbeat(rank=0, count=3, step=4, age=1.0),)
    codec.save(beats, NodeHeartbeats(round=1, node=0, written_ns=1_795_000_100_000_000_000, ranks=ranks))
    return builder.root


def damage(root: Path, chance: random.Random) -> None:
    """Half of all files and folders, each in its own way."""
    for folder, folders, files in os.walk(root, topdown=False):
        for name in files:
            path = Path(folder, name)
            raw = path.read_bytes()
            match chance.randrange(14):
                case 0 | 1 | 2 | 3:
                    path.unlink()
                case 4:
                    path.write_bytes(raw[: chance.randrange(len(raw) + 1)])
                case 5:
                    path.write_bytes(raw[chance.randrange(len(raw) + 1) :])
                case 6:
                    at = chance.randrange(len(raw) + 1)
                    path.write_bytes(raw[:at] + chance.randbytes(40) + raw[at + 40 :])
                case 7:
                    lines = raw.splitlines(keepends=True)
                    path.write_bytes(b"".join(line for line in lines if chance.random() < 0.5))
                case 8:
                    path.unlink()
                    os.mkfifo(path)
                case 9:
                    path.unlink()
                    path.mkdir()
                case _:
                    pass
        for name in folders:
            if chance.random() < 0.05:
                shutil.rmtree(Path(folder, name))


@pytest.mark.parametrize("seed", SEEDS)
def test_never_a_traceback(whole: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    root = tmp_path / "copy"
    shutil.copytree(whole, root)
    damage(root, chance)
    (root / "attempt-001").mkdir(exist_ok=True)  # so that it is a run directory at all
    history = collect_run(root)
    text = render_text(Document(history))
    assert len(text.splitlines()) <= 40
    assert not any(ord(char) < 32 and char != "\n" for char in text)
    assert len(json.loads(json_report(Document(history)))["attempts"]) == len(history.attempts)
    assert render_html(Document(history)).startswith("<!doctype html>")
    for attempt in history.attempts:
        assert render_text(Document(history, attempt=attempt.number), max_lines=None)
        told = root / f"attempt-{attempt.number:03d}" / "attempt.json"
        is_lost = not told.is_file() or b'"version": 1' not in told.read_bytes()
        assert not is_lost or any(problem.startswith("attempt.json: ") for problem in attempt.problems)
    if not (root / "run.json").is_file():
        assert history.problems


def keep_only(root: Path, *kept: str) -> None:
    for path in sorted(root.rglob("*"), reverse=True):
        if path.is_file() and not any(part in str(path) for part in kept):
            path.unlink()


@pytest.mark.parametrize("kept", ["rank-00005/error.json", "events/agent-00002", "events/"])
def test_one_witness_is_enough_for_the_cause(whole: Path, tmp_path: Path, kept: str) -> None:
    root = tmp_path / "copy"
    shutil.copytree(whole, root)
    keep_only(root, kept)
    (failure,) = (f for f in collect_run(root).attempts[0].rounds[0].failures if f.global_rank == 5)
    assert failure.message == "ValueError: bad batch 17"
    assert (failure.attempt, failure.round) == (0, 0)
    text = render_text(Document(collect_run(root)))
    assert "  incomplete   : " in text


def test_a_copy_elsewhere_tells_the_same(whole: Path, tmp_path: Path) -> None:
    root = tmp_path / "elsewhere" / "run-1"
    shutil.copytree(whole, root)
    here, there = (json.loads(json_report(Document(collect_run(folder)))) for folder in (whole, root))
    assert str(whole) not in json.dumps(there["verdict"])
    assert json.dumps(there).replace(str(root), str(whole)) == json.dumps(here)

"""What the report shows of a hung round beside its cause: every thread, every heartbeat, and who had no stack."""

from __future__ import annotations

from html import unescape
from pathlib import Path

import pytest

from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document
from hpc_elastic.report.render_html import render_html
from hpc_elastic.report.render_text import render_text
from hpc_elastic.report.write import render_json
from tests.browser.sample_runs import collectives_run
from tests.rigs.run_builder import RunBuilder, make_failure

WAIT, GET = ["train.py:9 step", "c10d.py:5 all_reduce"], ["data.py:3 get"]
STUCK = "D (disk sleep) in rpc_wait_bit_killable, system call read <x>"


@pytest.fixture
def builder(tmp_path: Path) -> RunBuilder:
    """Four nodes of one rank: rank 3 sits in the kernel, the others wait for it."""
    builder = RunBuilder(tmp_path / "run-1").begin()
    builder.fail(make_failure(3, at=30, exception="hang: no heartbeat for 60.0 s"))
    for rank in range(4):
        beat = {"rank": rank, "local_rank": 0, "step": 8, "section": "step", "age": 60.0 + rank, "count": 9}
        stacks = {
            "groups": [{"ranks": [rank], "stack": WAIT}],
            "threads": [{"ranks": [rank], "name": "loader" if rank else "", "stack": GET}],
            "beats": [beat],
        }
        if rank == 3:
            beat |= {"step": 7, "section": "load"}
            stacks = {"silent": [3], "states": [{"rank": 3, "state": STUCK}], "beats": [beat]}
        builder.event(0, "agent", rank, 31, "stacks_taken", round=0, **stacks)
        builder.stopped(0, rank, at=32)
    return builder


def test_the_text_has_every_rank(builder: RunBuilder) -> None:
    text = render_text(Document(collect_run(builder.root)))
    start = text.index("Where each rank's main thread was")
    assert text[start:].splitlines()[1:7] == [
        f"  rank 3: no Python stack; {STUCK}",
        "  ranks 0-2: all_reduce (c10d.py:5) < step (train.py:9)",
        "  other threads: 2 more places (--all shows them; stacks.txt has all)",
        "Last heartbeats:",
        "  rank 3: at step 7, section 'load', silent for 63.0 s",
        "  ranks 0-2: at step 8, section 'step', silent for 60.0-62.0 s",
    ]


def test_all_and_json_have_the_other_threads(builder: RunBuilder) -> None:
    lines = render_text(Document(collect_run(builder.root)), max_lines=None).splitlines()
    start = lines.index("Where the other threads were:")
    assert lines[start + 1 : start + 3] == ["  rank 0: get (data.py:3)", "  ranks 1-2 [loader]: get (data.py:3)"]
    (part,) = render_json(Document(collect_run(builder.root)))["attempts"][0]["rounds"]
    assert part["stacks"] == [
        {"ranks": "3", "stack": [], "state": STUCK},
        {"ranks": "0-2", "stack": WAIT, "state": ""},
    ]
    assert part["threads"] == [
        {"ranks": "0", "name": "", "stack": GET},
        {"ranks": "1-2", "name": "loader", "stack": GET},
    ]
    assert [(word["rank"], word["step"], word["section"]) for word in part["heartbeats"]][2:] == [
        (2, 8, "step"),
        (3, 7, "load"),
    ]


def test_what_is_foreign_in_it_is_left_out(builder: RunBuilder) -> None:
    builder.event(0, "agent", 0, 33, "stacks_taken", round=0, groups={}, threads=[1, {"ranks": "x"}], states=[None, 3])
    (part,) = collect_run(builder.root).attempts[0].rounds
    assert len(part.stacks) == len(part.threads) == 2


SIZE = "(4.0 MiB bf16)"
WHYS = {
    0: f"it called all_reduce #40 of group default_pg {SIZE} where rank 1 called broadcast",
    1: f"it called broadcast #40 of group default_pg where rank 0 called all_reduce {SIZE}",
    2: f"it never entered all_reduce #40 of group default_pg {SIZE}, which ranks 0-1 wait in; "
    "its last there was all_reduce #39",
}


def test_every_report_says_what_each_suspect_entered_and_what_it_did_not(tmp_path: Path) -> None:
    history = collect_run(collectives_run(tmp_path / "run").root)
    suspects = render_json(Document(history))["verdict"]["suspects"]
    assert {one["rank"]: one["why"] for one in suspects} == WHYS
    text, page = " ".join(render_text(Document(history)).split()), unescape(render_html(Document(history)))
    for rank, why in WHYS.items():
        assert f"rank {rank} (n1): {why}" in text
        assert f"rank {rank} (n1): {why}" in page

"""The soak's pure parts: what is planned, what counts as explained, and the table."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.soak.explain import Asked, Told, explanation
from tests.soak.faults import NATURES, Fault, Kind, plan
from tests.soak.injections import Injection
from tests.soak.journal import Journal
from tests.soak.table import table, update

AT = 1_700_000_000.0


def fault(kind: Kind) -> Fault:
    return Fault(number=1, kind=kind, gap=0.0, pick=0.0, seconds=0.0)


def asked(kind: Kind, *, went_on: bool = False) -> Asked:
    return Asked(fault=fault(kind), node="n2", pid=77, at=AT, until=AT + 9, went_on=went_on, host_dead=False)


def told(*, host: str = "n2", pid: int = 77, at: float = AT + 0.1, kind: str = "root") -> Told:
    member = {"host": host, "pid": pid, "ended_ns": int(at * 1e9), "global_rank": 1, "exitcode": -9}
    lost = {"host": host, "seen_ns": int(at * 1e9), "left": None}
    part = {"index": 0, "failures": [{"members": [member], "first": {"failure_class": kind}}], "lost_nodes": [lost]}
    attempt: dict[str, Any] = {"number": 0, "rounds": [part], "agents_ended": [], "ended_ns": None, "notices": []}
    return Told(report={"attempts": [attempt]}, events=())


def test_a_seed_gives_the_same_faults_again_each_kind_once_first() -> None:
    some = list(islice(plan(5), 60))
    assert some == list(islice(plan(5), 60))
    assert some != list(islice(plan(6), 60))
    assert {planned.kind for planned in some[: len(Kind)]} == set(Kind)
    for planned in some:
        low, high = NATURES[planned.kind].seconds
        assert low <= planned.seconds <= high


def test_only_the_fault_that_was_done_explains_it() -> None:
    killed = Kind.WORKER_KILLED
    assert "rank 1 on n2: root, exit code -9" in explanation(asked(killed), told())
    assert explanation(asked(killed), told(host="n3")) == "", "another node's"
    assert explanation(asked(killed), told(pid=78)) == "", "another worker's"
    assert explanation(asked(killed), told(at=AT - 60)) == "", "an earlier one"
    assert explanation(asked(killed), told(at=AT + 60)) == "", "a later one"
    assert explanation(asked(killed, went_on=True), told(pid=78)) == "", "a worker that dies is never passed over"


def test_a_hang_must_be_called_one_and_a_lost_node_be_named() -> None:
    assert explanation(asked(Kind.WORKER_HANG), told()) == ""
    assert "hang" in explanation(asked(Kind.WORKER_HANG), told(kind="hang"))
    assert "node n2 lost" in explanation(asked(Kind.NODE_OFF), told())
    assert explanation(asked(Kind.NODE_OFF), told(host="n3")) == ""


def test_what_need_not_disturb_is_explained_by_training_on_alone() -> None:
    nothing = Told(report={"attempts": []}, events=())
    assert explanation(asked(Kind.SLURMD_STOPPED, went_on=True), nothing) == "trained on in the same round"
    assert explanation(asked(Kind.SLURMD_STOPPED), nothing) == ""


def test_a_journal_is_read_on_and_shows_two_trainings_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path)

    def note(name: str, **facts: object) -> None:
        with open(tmp_path / name, "a") as file:
            file.write(json.dumps({"attempt": 0, **facts}) + "\n")

    note("a.jsonl", round=0, t=1.0, step=1)
    journal.read()
    note("b.jsonl", round=1, t=2.0, step=2)
    with open(tmp_path / "b.jsonl", "a") as file:
        file.write('{"attempt": 0, "rou')
    journal.read()
    assert [step.position for step in journal.steps] == [(1,), (2,)]
    assert journal.overlaps() == []
    assert journal.first_after(0.5, beyond=(0, 0)) == journal.last
    note("a.jsonl", round=0, t=3.0, step=2)
    journal.read()
    assert len(journal.overlaps()) == 1


def test_the_table_says_who_was_never_well_again_and_goes_into_the_page(tmp_path: Path) -> None:
    good = Injection(fault=fault(Kind.WORKER_KILLED), at=AT, before=(0, 0), trained_at=AT + 4, explained="yes")
    bad = Injection(fault=fault(Kind.SRUN_KILLED), at=AT, before=(0, 0))
    text = table([good, bad])
    assert "- worker killed -9 (1): 4.0 s\n" in text
    assert "- srun killed; 1 not in the report (1): -, at most never (1 times)" in text
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- soak: begin -->\nold\n<!-- soak: end -->\nb\n")
    update(page, text)
    assert "old" not in page.read_text()
    assert page.read_text().startswith("a\n<!-- soak: begin -->\n\nFault (how often)")
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no"):
        update(page, text)

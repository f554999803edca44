"""Which nodes are bad, and how many of them a run may do without."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpc_elastic.run.node_score import (
    BAD,
    MOST_EVIDENCE,
    WEIGHTS,
    Evidence,
    EvidenceKind,
    NodeRecord,
    choose_excluded,
    forget_in,
    load_record,
    save_record,
    score_nodes,
)

HOUR = 3600 * 10**9
NOW = 1_000_000 * HOUR
NAMES = ("n1", "n2", "n3", "n4", "n5", "n6")


def seen(node: str = "n1", kind: EvidenceKind = EvidenceKind.LOST, *, ago: float = 1.0, **more: object) -> Evidence:
    return Evidence(node=node, kind=kind, at_ns=NOW - int(ago * HOUR), **more)  # type: ignore[arg-type]


def first(node: str, fingerprint: str = "signal:SIGSEGV", *, ago: float = 1.0) -> Evidence:
    return seen(node, EvidenceKind.FIRST_FAILURE, ago=ago, fingerprint=fingerprint)


def bad(*evidence: Evidence, hours: float = 24) -> list[str]:
    return [score.node for score in score_nodes(evidence, now_ns=NOW, hours=hours) if score.is_bad]


def test_who_is_spared_is_told_why() -> None:
    scores = score_nodes([seen(name, ago=index) for index, name in enumerate(NAMES, 1)], now_ns=NOW)
    found = choose_excluded(scores, known=NAMES, usable=NAMES, need=5, required=("n2",))
    assert found.nodes == ("n1",)
    assert dict(found.spared) == {
        "n2": "the job asks for it by name",
        **dict.fromkeys(("n3", "n4", "n5", "n6"), "fewer than the 5 nodes that the run needs would be left"),
    }


def slow(node: str, rank: int) -> Evidence:
    return seen(node, EvidenceKind.SLOW, fingerprint=f"slow rank {rank}")


RAISED = [seen("n3", EvidenceKind.FIRST_EXCEPTION, ago=ago, fingerprint="ValueError:1") for ago in (1, 2, 3, 4)]
REPEATED = [first("n3", ago=ago) for ago in (1, 2, 3)]


@pytest.mark.parametrize(
    ("evidence", "nodes"),
    [
        pytest.param([seen("n3", EvidenceKind.LOST)], ["n3"], id="a loss counts at once"),
        pytest.param([seen("n3", EvidenceKind.UNHEALTHY)], ["n3"], id="a failed check counts at once"),
        pytest.param([seen("n3", EvidenceKind.HARDWARE)], ["n3"], id="hardware counts at once"),
        pytest.param([first("n3")], [], id="one first failure"),
        pytest.param([first("n3"), first("n3", ago=2)], ["n3"], id="two first failures"),
        pytest.param([first("n3"), first("n3")], [], id="the same one told twice is one"),
        pytest.param(RAISED[:3], [], id="exceptions weigh less"),
        pytest.param(RAISED, ["n3"], id="and count when there are many"),
        pytest.param(REPEATED, ["n3"], id="one failure again and again"),
        pytest.param([*REPEATED, first("n4")], [], id="it moves with the code"),
        pytest.param([*REPEATED, first("n4", "signal:SIGBUS")], ["n3"], id="another failure is no move"),
        pytest.param([*REPEATED, seen("n3"), first("n4")], ["n3"], id="a lost node was lost all the same"),
        pytest.param([slow("n3", 5)], ["n3"], id="slow"),
        pytest.param([slow("n3", 5), slow("n4", 5)], [], id="slow on two nodes: the rank has more to do"),
        pytest.param([slow("n3", 5), slow("n4", 7)], ["n3", "n4"], id="two slow ranks"),
        pytest.param(
            [seen("n1", ago=5), seen("n2", ago=1), seen("n3", ago=3), seen("n3", ago=4)],
            ["n3", "n2", "n1"],
            id="the worst comes first",
        ),
        pytest.param([seen(ago=23.9)], ["n1"], id="nearly a day ago"),
        pytest.param([seen(ago=24)], [], id="it expires"),
        pytest.param([seen(ago=-0.5)], ["n1"], id="hosts' clocks differ"),
        pytest.param([seen(ago=-2)], [], id="but not by that much"),
    ],
)
def test_which_nodes_are_bad(evidence: list[Evidence], nodes: list[str]) -> None:
    assert bad(*evidence) == nodes


def test_the_score_says_until_when() -> None:
    assert bad(seen(ago=2), hours=1) == []
    (score,) = score_nodes([first("n1", ago=10), first("n1", ago=3), first("n1", ago=1)], now_ns=NOW)
    assert score.until_ns == NOW + 21 * HOUR, "then two of the three are gone"


@pytest.mark.parametrize(
    ("names", "facts", "out"),
    [
        pytest.param((), {}, (), id="none"),
        pytest.param(("n4", "n2"), {}, ("n2", "n4"), id="by name"),
        pytest.param(("n1", "n2", "n3"), {}, ("n1", "n2"), id="never more than a third"),
        pytest.param(("n1", "n2", "n3"), {"share": 0.5}, ("n1", "n2", "n3"), id="or the share that was given"),
        pytest.param(("n1", "n2"), {"need": 5}, ("n1",), id="never fewer than the run needs"),
        pytest.param(("n1",), {"need": 6}, (), id="as many as the run needs"),
        pytest.param(("n1",), {"need": 5, "usable": set(NAMES) - {"n1"}}, ("n1",), id="it is down: nobody misses it"),
        pytest.param(("n1",), {"required": {"n1"}}, (), id="the job asks for it"),
        *(
            pytest.param((name,), {}, (), id=f"unknown to Slurm: {name}")
            for name in ("None assigned", "(null)", "", "n7", "n[1-2]", "n1,n2")
        ),
    ],
)
def test_which_nodes_are_left_out(names: tuple[str, ...], facts: dict[str, Any], out: tuple[str, ...]) -> None:
    scores = score_nodes([seen(name, ago=index) for index, name in enumerate(names, 1)], now_ns=NOW)
    assert choose_excluded(scores, **{"known": set(NAMES), "usable": set(NAMES), "need": 1, **facts}).nodes == out


evidences = st.lists(
    st.builds(
        Evidence,
        node=st.sampled_from((*NAMES, "gone", "None assigned", "(null)", "")),
        kind=st.sampled_from(EvidenceKind),
        at_ns=st.integers(NOW - 40 * HOUR, NOW + 2 * HOUR),
        fingerprint=st.sampled_from(("", "signal:SIGSEGV", "ValueError:1")),
    ),
    max_size=30,
)
nodes = st.frozensets(st.sampled_from(NAMES))


@given(evidences, nodes, nodes, nodes, st.integers(0, 8), st.sampled_from((0.1, 1 / 3, 0.5, 1.0)))
def test_never_too_many_and_never_a_stranger(
    evidence: list[Evidence],
    known: frozenset[str],
    usable: frozenset[str],
    required: frozenset[str],
    need: int,
    share: float,
) -> None:
    scores = score_nodes(evidence, now_ns=NOW)
    found = choose_excluded(scores, known=known, usable=usable, need=need, required=required, share=share)
    out = set(found.nodes)
    assert len(out) == len(found.nodes)
    assert out <= known - required
    assert len(out) <= len(known) * share + 1e-9
    assert len((usable & known) - out) >= min(need, len(usable & known)) or not out & usable
    assert out <= {score.node for score in scores if score.is_bad}
    spared = {name for name, _ in found.spared}
    assert not spared & out
    assert spared | out == {score.node for score in scores if score.is_bad and score.node in known}


@given(evidences, st.integers(0, 80))
@example([seen("n1", EvidenceKind.SLOW, ago=23.5), seen("n2", EvidenceKind.SLOW)], 1)
def test_time_alone_only_ever_clears_a_node_of_what_broke_it(evidence: list[Evidence], hours: int) -> None:
    hard = [item for item in evidence if WEIGHTS[item.kind] >= BAD and item.at_ns <= NOW]
    now = {score.node: score.score for score in score_nodes(hard, now_ns=NOW)}
    later = {score.node: score.score for score in score_nodes(hard, now_ns=NOW + hours * HOUR)}
    assert all(later[node] <= now[node] for node in later)
    assert hours < 24 or not later


@given(evidences)
def test_neither_order_nor_repetition_matters(evidence: list[Evidence]) -> None:
    assert score_nodes(evidence, now_ns=NOW) == score_nodes([*reversed(evidence), *evidence], now_ns=NOW)


# -- nodes.json: written whole, read whatever is there, forgotten when told

MISSING = Evidence(node="n3", kind=EvidenceKind.LOST, at_ns=NOW, why="node n3 was lost", attempt=0, round=1)
UNFIT = Evidence(node="n4", kind=EvidenceKind.UNHEALTHY, at_ns=NOW - 5, why="/tmp is full")


def test_a_record_is_kept_and_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    assert load_record(path) == NodeRecord()
    assert forget_in(path, None) == 0
    record = NodeRecord(evidence=(UNFIT, MISSING), excluded=("n3",), saved_ns=NOW)
    save_record(path, record)
    assert load_record(path) == record
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert forget_in(path, ["n3"]) == 1
    assert load_record(path) == NodeRecord(evidence=(UNFIT,), excluded=("n3",), saved_ns=NOW)
    assert (forget_in(path, ["n3"]), forget_in(path, None)) == (0, 1)
    many = [Evidence(node="n1", kind=EvidenceKind.LOST, at_ns=index) for index in range(MOST_EVIDENCE + 10)]
    save_record(path, NodeRecord(evidence=tuple(many)))
    assert [item.at_ns for item in load_record(path).evidence] == list(range(10, MOST_EVIDENCE + 10))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "unreadable"),
        ("{", "unreadable"),
        ("[]", "holds a list"),
        ('{"version": 2}', "format version 2"),
        ('{"version": 1}', ""),
        ('{"version": 1, "evidence": 7, "excluded": "n1", "saved_ns": "x"}', ""),
        ('{"version": 1, "evidence": [7, {}, {"kind": "cursed", "node": "n1"}, {"kind": "lost"}]}', ""),
        ('{"version": 1, "evidence": [{"kind": "lost", "node": "n1", "at_ns": "soon"}]}', ""),
        ('{"version": 1, "evidence": [{"kind": "lost", "node": ["n1"], "at_ns": 1}], "excluded": [1]}', ""),
    ],
)
def test_what_can_not_be_read_counts_for_nothing(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(text)
    record = load_record(path)
    assert (record.evidence, record.excluded) == ((), ())
    assert problem in record.problem
    assert bool(problem) is bool(record.problem)

"""Which nodes are bad, and how many of them a run may do without."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from hpc_elastic.run.node_score import BAD, WEIGHTS, Evidence, EvidenceKind, choose_excluded, score_nodes

HOUR = 3600 * 10**9
NOW = 1_000_000 * HOUR
NAMES = ("n1", "n2", "n3", "n4", "n5", "n6")


def seen(node: str = "n1", kind: EvidenceKind = EvidenceKind.LOST, *, ago: float = 1.0, **more: object) -> Evidence:
    return Evidence(node=node, kind=kind, at_ns=NOW - int(ago * HOUR), **more)  # type: ignore[arg-type]


def first(node: str, fingerprint: str = "signal:SIGSEGV", *, ago: float = 1.0) -> Evidence:
    return seen(node, EvidenceKind.FIRST_FAILURE, ago=ago, fingerprint=fingerprint)


def bad(*evidence: Evidence, hours: float = 24) -> list[str]:
    return [score.node for score in score_nodes(evidence, now_ns=NOW, hours=hours) if score.is_bad]


@pytest.mark.parametrize("kind", [EvidenceKind.LOST, EvidenceKind.UNHEALTHY, EvidenceKind.HARDWARE])
def test_what_breaks_with_the_node_counts_at_once(kind: EvidenceKind) -> None:
    assert bad(seen("n3", kind)) == ["n3"]


def test_a_first_failure_counts_when_there_is_another() -> None:
    assert bad(first("n3")) == []
    assert bad(first("n3"), first("n3", ago=2)) == ["n3"]
    assert bad(first("n3"), first("n3")) == [], "the same one told twice is one"


def test_exceptions_weigh_less_than_what_no_code_raises() -> None:
    raised = [seen("n3", EvidenceKind.FIRST_EXCEPTION, ago=ago, fingerprint="ValueError:1") for ago in (1, 2, 3, 4)]
    assert bad(*raised[:3]) == []
    assert bad(*raised) == ["n3"]


def test_a_failure_that_moves_with_the_code_speaks_against_no_node() -> None:
    repeated = [first("n3", ago=ago) for ago in (1, 2, 3)]
    assert bad(*repeated) == ["n3"]
    assert bad(*repeated, first("n4")) == []
    assert bad(*repeated, first("n4", "signal:SIGBUS")) == ["n3"], "another failure is no move"
    assert bad(*repeated, seen("n3"), first("n4")) == ["n3"], "and a lost node was lost all the same"


def test_a_rank_that_is_slow_on_two_nodes_has_more_to_do() -> None:
    slow = [seen(name, EvidenceKind.SLOW, fingerprint=f"slow rank {rank}") for name, rank in (("n3", 5), ("n4", 5))]
    assert bad(slow[0]) == ["n3"]
    assert bad(*slow) == []
    assert bad(slow[0], replace(slow[1], fingerprint="slow rank 7")) == ["n3", "n4"]


def test_it_expires_and_the_score_says_when() -> None:
    assert bad(seen(ago=23.9)) == ["n1"]
    assert bad(seen(ago=24)) == []
    assert bad(seen(ago=2), hours=1) == []
    assert bad(seen(ago=-0.5)) == ["n1"], "hosts' clocks differ"
    assert bad(seen(ago=-2)) == [], "but not by that much"
    (score,) = score_nodes([first("n1", ago=10), first("n1", ago=3), first("n1", ago=1)], now_ns=NOW)
    assert score.until_ns == NOW + 21 * HOUR, "then two of the three are gone"


def test_the_worst_comes_first() -> None:
    assert bad(seen("n1", ago=5), seen("n2", ago=1), seen("n3", ago=3), seen("n3", ago=4)) == ["n3", "n2", "n1"]


def exclude(*names: str, usable: set[str] | None = None, **more: object) -> tuple[str, ...]:
    scores = score_nodes([seen(name, ago=index) for index, name in enumerate(names, 1)], now_ns=NOW)
    facts = {"known": set(NAMES), "usable": set(NAMES) if usable is None else usable, "need": 1, **more}
    return choose_excluded(scores, **facts).nodes  # type: ignore[arg-type]


def test_who_is_left_out() -> None:
    assert exclude() == ()
    assert exclude("n2") == ("n2",)
    assert exclude("n4", "n2") == ("n2", "n4"), "sorted by name"
    assert exclude("n1", "n2", "n3") == ("n1", "n2"), "never more than a third"
    assert exclude("n1", "n2", "n3", share=0.5) == ("n1", "n2", "n3")
    assert exclude("n1", "n2", need=5) == ("n1",), "never fewer than the run needs"
    assert exclude("n1", need=6) == ()
    assert exclude("n1", need=5, usable={"n2", "n3", "n4", "n5", "n6"}) == ("n1",), "it is down: nobody misses it"
    assert exclude("n1", required={"n1"}) == ()


@pytest.mark.parametrize("name", ["None assigned", "(null)", "", "n7", "n[1-2]", "n1,n2"])
def test_a_name_that_slurm_does_not_know_never_comes_out(name: str) -> None:
    assert exclude(name) == ()


def test_who_is_spared_is_told_why() -> None:
    scores = score_nodes([seen(name, ago=index) for index, name in enumerate(NAMES, 1)], now_ns=NOW)
    found = choose_excluded(scores, known=NAMES, usable=NAMES, need=5, required=("n2",))
    assert found.nodes == ("n1",)
    assert dict(found.spared) == {
        "n2": "the job asks for it by name",
        **dict.fromkeys(("n3", "n4", "n5", "n6"), "fewer than the 5 nodes that the run needs would be left"),
    }


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
def test_until_then_it_is_bad_and_from_then_on_it_is_not(evidence: list[Evidence]) -> None:
    hard = [replace(item, kind=EvidenceKind.LOST) for item in evidence]
    past = [item for item in hard if item.at_ns <= NOW]
    for score in score_nodes(past, now_ns=NOW):
        before = {one.node for one in score_nodes(past, now_ns=score.until_ns - 1) if one.is_bad}
        after = {one.node for one in score_nodes(past, now_ns=score.until_ns) if one.is_bad}
        assert score.node in before - after


@given(evidences)
def test_neither_order_nor_repetition_matters(evidence: list[Evidence]) -> None:
    assert score_nodes(evidence, now_ns=NOW) == score_nodes([*reversed(evidence), *evidence], now_ns=NOW)

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hpc_elastic.base.text import ranges
from hpc_elastic.failures.classify import kind_of, wording_of
from hpc_elastic.failures.failure_text import normalise_message
from hpc_elastic.failures.patterns import ONE_LOSS, PATTERNS, SYMPTOM_TYPES
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.blocks import Fold, fold_failures
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document
from hpc_elastic.report.render_html import render_html
from hpc_elastic.report.render_text import render_text
from hpc_elastic.report.write import render_json
from tests.rigs.run_builder import GLOO, RunBuilder, decide_verdict, make_failure

_GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/"
CLOSED = f"RuntimeError: {GLOO.format(rank=3)}"
READ = f"{_GLOO}pair.cc:544] Read error [10.0.0.3]:24496: Connection reset by peer"
WRITE = f"{_GLOO}pair.cc:302] Write error [10.0.0.3]:24496: Broken pipe"
PIPE = "BrokenPipeError: [Errno 32] Broken pipe"
STORE = "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed."
SENDS = "torch.distributed.DistNetworkError: sendBytes failed on SocketImpl(fd=3): Broken pipe"
CONNECTS = "RuntimeError: Gloo connectFullMesh failed with SO_ERROR: Connection refused"
NCCL = "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"
LOSSES = (CLOSED, READ, WRITE, PIPE, STORE, SENDS, CONNECTS, NCCL)
"""What ranks say of one peer that vanished."""
WAITED = f"{_GLOO}unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"
SENT_LATE = f"{_GLOO}unbound_buffer.cc:137] Timed out waiting 2000ms for send operation to complete"


@given(st.sets(st.integers(min_value=0, max_value=60)))
def test_rank_ranges_name_exactly_the_ranks(ranks: set[int]) -> None:
    named: set[int] = set()
    for part in filter(None, ranges(tuple(ranks)).split(",")):
        first, _, last = part.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == ranks


def test_the_same_failure_on_many_ranks_is_one_entry() -> None:
    texts = [f"RuntimeError: {GLOO.format(rank=rank)}" for rank in range(500)]
    failures = [make_failure(rank, at=2 - rank / 1000, exception=text) for rank, text in enumerate(texts)]
    failures.append(make_failure(500, at=1, exception="ValueError: bad"))
    folds = fold_failures(failures)
    assert [(fold.first.global_rank, ranges(fold.ranks)) for fold in folds] == [(500, "500"), (499, "0-499")]
    assert folds[1].hosts[:2] == ("n1", "n2")
    assert len(folds[1].hosts) == 500


def test_another_exit_code_or_class_is_another_entry() -> None:
    one, other = make_failure(0, at=1, exitcode=3), make_failure(1, at=1, exitcode=4)
    ended = make_failure(2, at=1, exitcode=-9, stopped_by_agent=True)
    killed = make_failure(3, at=1, exitcode=-9)
    assert len(fold_failures([one, other, ended, killed])) == 4


def test_what_one_loss_says_is_in_the_table() -> None:
    """A row whose words change must not fall out of it unseen."""
    symptoms = {words.says for words in PATTERNS if words.failure_class is FailureClass.SYMPTOM}
    assert not ONE_LOSS - symptoms - set(SYMPTOM_TYPES.values())


def test_one_loss_in_many_wordings_is_one_entry() -> None:
    failures = [
        replace(make_failure(rank, at=9 - rank, exception=text), exitcode=(1, -6)[rank % 2])
        for rank, text in enumerate((*LOSSES, READ, READ))
    ]
    assert {failure.failure_class for failure in failures} == {FailureClass.SYMPTOM}
    failures.append(make_failure(50, at=0.5, exception="ValueError: bad"))
    cause, loss = sorted(fold_failures(failures), key=lambda fold: len(fold.members))
    assert cause.ranks == (50,)
    assert ranges(loss.ranks) == "0-9"
    assert loss.first.global_rank == 9
    # "Read error" three times, with two exit codes: 1 and 9 with -6, 8 with 1.
    assert loss.wordings[0].ranks == (1, 9)
    assert loss.headline == failures[9].headline
    assert len(loss.wordings) == len(LOSSES) + 1
    assert sorted(rank for same in loss.wordings for rank in same.ranks) == list(range(10))


def test_another_kind_of_consequence_is_another_entry() -> None:
    """Who waited until a timeout was not told of a lost peer."""
    texts = (CLOSED, WAITED, SENT_LATE, READ)
    folds = fold_failures([make_failure(rank, at=rank, exception=text) for rank, text in enumerate(texts)])
    assert [fold.ranks for fold in folds] == [(0, 3), (1, 2)]
    assert [len(fold.wordings) for fold in folds] == [2, 2]


def test_a_consequence_of_unknown_words_is_folded_by_them() -> None:
    odd = [replace(make_failure(rank, at=rank, exception=CLOSED), reason="") for rank in range(2)]
    other = replace(make_failure(2, at=2, exception=READ), reason="")
    assert [fold.ranks for fold in fold_failures([*odd, other])] == [(0, 1), (2,)]


_TEXTS = (*LOSSES, WAITED, SENT_LATE, "ValueError: bad", "ValueError: good", "")
_FAILURES = st.lists(
    st.tuples(st.sampled_from(_TEXTS), st.sampled_from((1, 3, -6)), st.booleans(), st.integers(0, 4)), max_size=14
)


def _failure(rank: int, drawn: tuple[str, int, bool, int]) -> WorkerFailure:
    text, exitcode, stopped, at = drawn
    return make_failure(rank, at=at, exception=text, exitcode=exitcode, stopped_by_agent=stopped and not text)


def _sets(folds: tuple[Fold, ...]) -> set[tuple[str, str, tuple[tuple[int, ...], ...]]]:
    words = ((normalise_message(fold.headline), fold) for fold in folds)
    return {(text, ranges(fold.ranks), tuple(same.ranks for same in fold.wordings)) for text, fold in words}


@given(_FAILURES, st.randoms(use_true_random=False))
def test_folds_part_the_failures_and_no_chance_moves_one(drawn: list[tuple[str, int, bool, int]], rng: object) -> None:
    failures = [_failure(rank, item) for rank, item in enumerate(drawn)]
    folds = fold_failures(failures)
    assert sorted(rank for fold in folds for rank in fold.ranks) == list(range(len(failures)))
    assert len({kind_of(fold.first) for fold in folds}) == len(folds)
    for fold in folds:
        assert {kind_of(failure) for failure in fold.members} == {kind_of(fold.first)}
        assert fold.first is fold.members[0]
        assert [len(same.members) for same in fold.wordings] == sorted(
            (len(same.members) for same in fold.wordings), reverse=True
        )
        assert sorted(rank for same in fold.wordings for rank in same.ranks) == list(fold.ranks)
        for same in fold.wordings:
            assert {wording_of(failure) for failure in same.members} == {wording_of(same.first)}
        if fold.first.failure_class is not FailureClass.SYMPTOM:
            assert len(fold.wordings) == 1
    assert sum(1 for fold in folds if fold.first.reason in ONE_LOSS) <= 1
    # Neither the order in which they are read nor who was first says who is with whom, or what is said of them.
    shuffled = list(failures)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert fold_failures(shuffled) == folds
    times = [(failure.ended_ns, failure.ended_uptime_ns) for failure in shuffled]
    other_times = [
        replace(failure, ended_ns=ended, ended_uptime_ns=uptime)
        for failure, (ended, uptime) in zip(failures, times, strict=True)
    ]
    assert _sets(fold_failures(other_times)) == _sets(folds)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fdatasync", lambda fd: None)
    monkeypatch.setattr("os.fsync", lambda fd: None)


def _many_words(root: Path, *, cause: str = "ValueError: bad batch", error_files: bool = True) -> RunBuilder:
    """512 ranks on 64 nodes; rank 37 is the cause, the others lost it in three wordings."""
    builder = RunBuilder(root, nodes=64, per_node=8).begin()
    for rank in range(512):
        text = cause if rank == 37 else READ if rank % 5 == 1 else PIPE if rank == 500 else CLOSED
        failure = make_failure(rank, at=60 + (rank * 7 % 512) / 1000 + (rank != 37), exception=text, per_node=8)
        builder.fail(failure, error_file=error_files)
    builder.stopped(0, 0, at=63)
    return builder


@pytest.mark.parametrize("error_files", [True, False])
def test_a_lost_peer_on_512_ranks_is_one_line(tmp_path: Path, error_files: bool) -> None:
    """Also where only the agents' events are left."""
    history = collect_run(_many_words(tmp_path / "run", error_files=error_files).root)
    lines = render_text(Document(history)).splitlines()
    at = lines.index("Other failures in that round: 511")
    assert lines[at + 1].startswith("  ranks 0-36,38-511 on 64 hosts, from ")
    assert "[consequence, in 3 wordings]: RuntimeError: Connection closed by p..." in lines[at + 1]
    assert not lines[at + 2].startswith("  rank")
    lines = render_text(Document(history), max_lines=None).splitlines()
    at = lines.index("Other failures in that round: 511")
    assert lines[at + 2].startswith("    ranks 0,2-5,7-10,")
    assert ": RuntimeError: Connection closed by peer [10.0.0.3]" in lines[at + 2]
    assert lines[at + 3].startswith("    ranks 1,6,11,")
    assert ": RuntimeError: Read error [10.0.0.3]" in lines[at + 3]
    assert lines[at + 4] == f"    rank 500: {PIPE}"
    (_, loss) = json.loads(json.dumps(render_json(Document(history))))["attempts"][0]["rounds"][0]["failures"]
    assert [(same["count"], same["first"]["message"] if error_files else "") for same in loss["wordings"]] == [
        (407, CLOSED * error_files), (103, READ * error_files), (1, PIPE * error_files)
    ]  # fmt: skip
    page = render_html(Document(history))
    assert "The same on 511 ranks, in 3 wordings" in page
    assert "(+2 other wordings)" in page
    assert ("<summary>Traceback (rank 500)</summary>" in page) is error_files


def test_where_all_are_consequences_the_words_part_nobody(tmp_path: Path) -> None:
    """Which of them was first is chance, and so are its words."""
    failures = [make_failure(rank, at=rank, exception=text) for rank, text in enumerate(LOSSES)]
    assert decide_verdict(failures).same_failure == tuple(range(len(LOSSES)))
    builder = _many_words(tmp_path / "run", cause=READ)
    lines = render_text(Document(collect_run(builder.root))).splitlines()
    (line,) = [line for line in lines if line.startswith("  ranks 0-511 on 64 hosts, from ")]
    assert "[consequence, in 3 wordings]" in line

from __future__ import annotations

import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from hpc_elastic.base.files import read_json
from hpc_elastic.output.log_reader import OutputReader
from hpc_elastic.output.log_streams import merged, read_round_marks, readers_of, round_numbers, streams_of
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document
from hpc_elastic.report.render_text import render_text
from hpc_elastic.report.write import write_report
from hpc_elastic.run.event_reader import EventFile, event_files
from hpc_elastic.run.fold import LARGEST_OUTPUT, fold_run
from hpc_elastic.run.log_pieces import piece_path
from hpc_elastic.run.node_score import NodeRecord, load_record, save_record
from hpc_elastic.run.paths import AttemptPaths, RunPaths, StoredResult
from hpc_elastic.store.file_store import FileStore, FoldedStore
from tests.rigs.fake_clock import FakeClock
from tests.rigs.run_builder import GLOO, RunBuilder, make_failure


def ended_run(root: Path, *, nodes: int = 2, per_node: int = 2, printed: Callable[[int], bytes]) -> RunPaths:
    """A run with one restart whose rank 2 raised."""
    builder = RunBuilder(root, nodes=nodes, per_node=per_node)
    builder.attempt(0)
    builder.round(0, 0, at=1)
    for rank in range(nodes * per_node):
        cause = "ValueError: bad" if rank == 2 else f"RuntimeError: {GLOO.format(rank=0)}"
        builder.fail(make_failure(rank, at=30 + 0.1 * (rank != 2), exception=cause, per_node=per_node))
    builder.round(0, 1, at=32, reason="restart 1 of 3 (2 left) after: ValueError: bad")
    builder.succeeded(0, 1, at=132)
    builder.end(0, at=140, outcome="succeeded", code=0, decision="end: the run succeeded")
    attempt = builder.paths.attempt(0)
    for index in range(2):
        for rank in range(nodes * per_node):
            place = attempt.rank(index, rank)
            place.root.mkdir(parents=True, exist_ok=True)
            place.stdout.write_bytes(printed(rank))
            piece_path(place.stdout, 0).write_bytes(b"first of rank %d\n" % rank)
            place.stderr.write_bytes(b"a warning without an end")
        for node in range(nodes):
            (attempt.round_dir(index) / f"times-node-{node:05d}").write_text("log times 1\n0 1 1 0 1795000000000000\n")
    store = FileStore(attempt.store, clock=FakeClock())
    for key in ("log/1", "log/2", "round/000000/join+a", "epoch/id"):
        store.put_if_absent(key, f"value of {key}" * (200 if key == "log/2" else 1))
    store.overwrite("hb/a", "1")
    (attempt.root / "health").mkdir()
    (attempt.root / "health" / "node-00000-a").write_bytes(b"x")
    (attempt.root / "store-host-00000.log").write_text("a warning of torch's\n")
    builder.paths.latest.symlink_to("attempt-000")
    builder.paths.pace_json.write_text("{}")
    builder.paths.preload.write_text('{"modules": ["torch"]}')
    save_record(builder.paths.nodes_json, NodeRecord(excluded=("n2",)))
    write_report(root, attempt=0, outcome="succeeded", exit_code=0)
    StoredResult(outcome="succeeded", reason="", exit_code=0, action="end", decision="").save(attempt.result_json)
    return builder.paths


def seen(paths: RunPaths) -> tuple[object, ...]:
    """What the readers of a run make of its files."""
    attempt = paths.attempt(0)
    store = FoldedStore(attempt.store, clock=FakeClock(), largest=1 << 20)
    printed = []
    for index in round_numbers(attempt):
        streams = streams_of(attempt, index)
        pieces = merged(readers_of(streams), read_round_marks(attempt.round_dir(index)))
        printed.append([(piece.stream.rank, piece.stream.stream, piece.time_us, piece.data) for piece in pieces])
    return (
        render_text(Document(collect_run(paths.root), attempt=0)),
        printed,
        {key: store.get(key) for key in ("log/1", "log/2", "log/3", "round/000000/join+a")},
        {folder: sorted(store.list(folder)) for folder in ("log", "round", "nothing")},
        load_record(paths.nodes_json),
        read_json(paths.preload),
    )


def counted(root: Path) -> tuple[int, int, int]:
    """Files, folders and links."""
    found = [0, 1, 0]
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            found[2 if path.is_symlink() else 1 if path.is_dir() else 0] += 1
    return found[0], found[1], found[2]


def fold(paths: RunPaths) -> None:
    fold_run(paths, is_late=lambda: False)


def test_a_run_that_is_over_is_few_files_that_say_the_same(tmp_path: Path) -> None:
    paths = ended_run(tmp_path / "run", printed=lambda rank: b"step %d\n" % rank)
    before = seen(paths)
    fold(paths)
    assert seen(paths) == before
    files, folders, links = counted(paths.root)
    assert (files, folders, links) == (9, 4, 0)
    attempt = paths.attempt(0)
    assert attempt.rank(0, 2).error_file.exists(), "the report names it"
    text = (attempt.root / "output.log").read_text()
    assert "==> round-001/rank-00003/stdout.log: 7 bytes <==\nstep 3\n\n==> round-001/rank-00003/stdout.log.000" in text
    links = set(re.findall(r'href="../(attempt-[^"]*)"', attempt.report_html.read_text()))
    assert {f"attempt-000/{name}" for name in ("output.log", "round-000/rank-00002/error.json")} <= links
    assert all((paths.root / link).exists() for link in links), links
    fold(paths)
    assert seen(paths) == before
    # What a later attempt writes counts before what was folded.
    save_record(paths.nodes_json, NodeRecord(excluded=("n3",)))
    assert load_record(paths.nodes_json).excluded == ("n3",)
    later = paths.attempt(1)
    later.root.mkdir()
    StoredResult(outcome="succeeded", reason="", exit_code=0, action="end", decision="").save(later.result_json)
    fold(paths)
    assert not paths.nodes_json.exists()
    assert load_record(paths.nodes_json).excluded == ("n3",)


def test_64_ranks_that_printed_much(tmp_path: Path) -> None:
    paths = ended_run(tmp_path / "run", nodes=8, per_node=8, printed=lambda rank: bytes(LARGEST_OUTPUT + 1))
    fold(paths)
    files, folders, links = counted(paths.root)
    assert files < 400
    assert (files, links) == (9 + 128, 0)
    assert folders == 2 + 2 + 128


def test_what_stays_where_it_is(tmp_path: Path) -> None:
    paths = ended_run(tmp_path / "run", printed=lambda rank: b"")
    attempt = paths.attempt(0)
    (attempt.rank(1, 0).root / "flight-recorder-0.json").write_bytes(b"{}")
    (attempt.root / "checkpoint").mkdir()
    (attempt.root / "checkpoint" / "rank-00000.pkl").write_bytes(pickle.dumps(2))
    os.mkfifo(attempt.rank(1, 1).stderr.with_name("stderr.log.001"))
    fold(paths)
    assert {path.name for path in attempt.rank(1, 0).root.iterdir()} == {
        "flight-recorder-0.json", "stdout.log", "stdout.log.000", "stderr.log",
    }  # fmt: skip
    assert (attempt.root / "checkpoint" / "rank-00000.pkl").exists()
    assert [path.name for path in attempt.rank(1, 1).root.iterdir()] == ["stderr.log.001"]


def test_an_attempt_without_an_end_and_one_that_is_late_are_left(tmp_path: Path) -> None:
    paths = ended_run(tmp_path / "run", printed=lambda rank: b"")
    before = counted(paths.root)
    fold_run(paths, is_late=lambda: True)
    assert counted(paths.root) == before
    paths.attempt(0).result_json.unlink()
    fold(paths)
    files, folders, links = before
    assert counted(paths.root) == (files - 2, folders, links - 1)  # pace.json


def test_a_reader_that_has_begun_goes_on_where_it_was(tmp_path: Path) -> None:
    paths = ended_run(tmp_path / "run", printed=lambda rank: b"first\nlast")
    attempt = paths.attempt(0)
    output = OutputReader(attempt.rank(1, 0).stdout)
    (written,) = [path for path in event_files(attempt.events) if path.name.startswith("supervisor")]
    events = EventFile(written, chunk=200)
    begun = [output.read(), events.read()]
    fold(paths)
    whole = OutputReader(attempt.rank(1, 0).stdout), EventFile(written)
    assert [chunk.data for chunk in (begun[0], output.read(), output.rest()) if chunk] == [
        chunk.data for chunk in (whole[0].read(), whole[0].read(), whole[0].rest()) if chunk
    ]
    assert [line.number for line in (*(begun[1] or ()), *events.events())] == [
        line.number for line in whole[1].events()
    ]


class _KilledError(BaseException):
    pass


def _killed_at(monkeypatch: pytest.MonkeyPatch, step: int, paths: RunPaths) -> bool:
    """Fold, and end at the `step`-th change of the disk. Returns whether there was one."""
    steps = count()

    def until_killed(action: Callable[..., object]) -> Callable[..., object]:
        def act(*args: object, **kwargs: object) -> object:
            if next(steps) >= step:
                raise _KilledError
            return action(*args, **kwargs)

        return act

    with monkeypatch.context() as patch:
        for name in ("unlink", "rmdir", "replace", "fsync"):
            patch.setattr(os, name, until_killed(getattr(os, name)))
        for name in ("unlink", "rmdir") if sys.version_info < (3, 11) else ():  # pathlib has its own of these
            patch.setattr(Path, name, until_killed(getattr(Path, name)))
        try:
            fold(paths)
        except _KilledError:
            return True
    return False


def _prefixes(monkeypatch: pytest.MonkeyPatch, original: Path, folder: Path) -> Iterator[RunPaths]:
    for step in count():
        copy = folder / f"{step}" / original.name
        shutil.copytree(original, copy, symlinks=True)
        has_stopped = _killed_at(monkeypatch, step, RunPaths(copy))
        yield RunPaths(copy)
        shutil.rmtree(copy.parent)
        if not has_stopped:
            return


def test_a_fold_that_is_killed_at_any_step_hides_nothing_and_is_finished_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ended_run(tmp_path / "run", printed=lambda rank: b"step %d\n" % rank)
    stopped = 0
    for stopped, paths in enumerate(_prefixes(monkeypatch, original.root, tmp_path)):
        shown = seen(paths)
        fold(paths)
        assert seen(paths) == shown, stopped
        hidden = list(paths.root.rglob(".report.html.*"))  # of the page that was being written again
        assert counted(paths.root) == (9 + len(hidden), 4, 0), stopped
        assert shown[1:] == seen(original)[1:], stopped
    assert stopped > 60


def test_a_planted_fold_is_bounded(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path / "attempt-000")
    attempt.root.mkdir()
    folded = attempt.root / "records.log"
    for text in ("==> events/a.jsonl: 99999999999999 bytes <==\n{}\n", "garbage\n", "==> ../x: 1 bytes <==\nx\n", ""):
        folded.write_text(text)
        assert round_numbers(attempt) == []
        assert list(collect_run(tmp_path).attempts[0].rounds) == []
    folded.unlink()
    os.mkfifo(folded)
    assert round_numbers(attempt) == []

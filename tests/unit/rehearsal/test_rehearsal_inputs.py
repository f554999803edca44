"""What a rehearsal reads: names of faults, losses in lines and journals, what was done to files."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.rehearsal.faults import NATURES, REHEARSED, Kind, Need, parse_kinds, plan
from hpc_elastic.rehearsal.journal import RunJournal, Source, parse_pattern, step_of_line
from hpc_elastic.rehearsal.saves import FileEvent, SaveWatch, WrittenNames, tear


def test_every_kind_is_in_the_catalogue_and_what_needs_the_cluster_is_not_rehearsed() -> None:
    assert set(NATURES) == set(Kind)
    assert Kind.NODE_OFF not in REHEARSED
    assert all(Need.CLUSTER_ROOT not in NATURES[kind].needs for kind in REHEARSED)


def test_faults_are_named_and_a_wrong_name_is_answered_with_those_there_are() -> None:
    assert parse_kinds("hang, kill-worker,hang") == (Kind.WORKER_HANG, Kind.WORKER_KILLED)
    assert parse_kinds("all") == REHEARSED
    for text in ("meteor", "node-off", ""):
        with pytest.raises(UsageError, match="fault"):
            parse_kinds(text)


def test_a_seed_gives_the_same_faults_again() -> None:
    some = list(islice(plan(5, REHEARSED), 40))
    assert some == list(islice(plan(5, REHEARSED), 40))
    assert some != list(islice(plan(6, REHEARSED), 40))
    assert {fault.kind for fault in some[: len(REHEARSED)]} == set(REHEARSED)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("step 12 loss=0.25", ((12,), 0.25)),
        ("epoch 3/10: loss=1.5e-3 accuracy=0.9", ((3,), 1.5e-3)),
        ("Epoch [2] Step [40] Loss: 0.5", ((2, 40), 0.5)),
        ('{"step": 7, "train_loss": -0.5}', ((7,), -0.5)),
        ("iteration 5, loss nan", ((5,), pytest.approx(float("nan"), nan_ok=True))),
        ("{'loss': '0.4512', 'grad_norm': '1.2', 'learning_rate': '4.9e-05', 'epoch': '0.0625'}", ((0.0625,), 0.4512)),
        ("Train Epoch: 2 [640/60000 (1%)]\tLoss: 2.25", ((2, 640), 2.25)),
        ("Epoch: [0][  10/5005]\tTime  0.53 ( 1.02)\tLoss 6.9e+00 (6.9e+00)", ((0, 10), 6.9)),
        (" iteration       12/      60 | lr: 2E-02 | lm loss: 4.895532E-01 | loss scale: 1.0 |", ((12,), 0.4895532)),
        ("Epoch 3:  40%|####  | 12/30 [00:12<00:18,  1.53s/it, v_num=0, train_loss=0.532]", ((3, 12), 0.532)),
        ("2026/11/23 10:00:00 epoch 4, batch 7: avg_loss 0.5", ((4, 7), 0.5)),
        ("step 10: train loss 4.25, val loss 4.5", ((10,), 4.25)),
        ("step 10: val_loss 4.5, total_loss 4.25", ((10,), 4.25)),
        ("epoch 4: val_loss 0.5", None),
        ("loss=0.25", None),
        ("step 12 done", None),
        ("step 12 glossary=3", None),
    ],
)
def test_losses_are_found_in_lines_as_people_print_them(line: str, found: object) -> None:
    assert step_of_line(line, None) == found


def test_a_pattern_of_the_users_own_needs_two_groups() -> None:
    assert step_of_line("3 -> 0.5", parse_pattern(r"(\d+) -> (\S+)")) == ((3,), 0.5)
    assert step_of_line("0.5 @ 3", parse_pattern(r"(?P<loss>\S+) @ (?P<step>\d+)")) == ((3,), 0.5)
    assert step_of_line("x -> y", parse_pattern(r"(\S+) -> (\S+)")) is None
    for text in ("(", r"loss (\S+)"):
        with pytest.raises(UsageError, match="--losses"):
            parse_pattern(text)


def test_a_file_of_the_scripts_is_read_on_and_journals_give_way_to_it(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    line = {"t": 1.0, "attempt": 0, "round": 1, "rank": 0, "step": 9, "loss": 5.0}
    (tmp_path / "journal" / "a.jsonl").write_text(json.dumps(line) + "\n")
    source = Source(file="losses.txt", is_asked=True)
    journal = RunJournal(tmp_path / "journal", work=tmp_path, source=source)
    (tmp_path / "losses.txt").write_text("step 1 loss 0.5\nstep 2 lo")
    journal.read()
    with open(tmp_path / "losses.txt", "a") as file:
        file.write("ss 0.25\n")
    journal.read()
    assert [(one.position, one.loss) for one in journal.steps] == [((1,), 0.5), ((2,), 0.25)]
    plain = RunJournal(tmp_path / "journal", source=Source())
    plain.read()
    assert [one.position for one in plain.steps] == [(9,)]


def test_a_progress_bars_step_counts_once_the_next_one_is_drawn(tmp_path: Path) -> None:
    """tqdm draws a new number with the loss before it, then with its own; or leaves the first out, as time has it."""
    bar = "\rEpoch 0:  50%|#| {}/9 [00:01<00:02, 8.0it/s, loss={}]"
    journal = RunJournal(tmp_path, work=tmp_path, source=Source(file="bar.txt"))
    with open(tmp_path / "bar.txt", "w", newline="") as file:
        for step, loss in ((1, 0.5), (2, 0.5), (2, 0.25), (3, 0.125), (4, 0.125)):
            file.write(bar.format(step, loss))
            file.flush()
            journal.read()
    assert [(one.position, one.loss) for one in journal.steps] == [((0, 1), 0.5), ((0, 2), 0.25)]


def watched(folder: Path, names: WrittenNames) -> SaveWatch:
    return SaveWatch([folder], names)


def test_a_file_that_was_written_in_place_is_brought_back_to_its_middle(tmp_path: Path) -> None:
    watch = watched(tmp_path, WrittenNames())
    (tmp_path / "ckpt").write_bytes(b"0123456789")
    events = watch.read()
    assert any(event.is_save for event in events)
    assert tear(events, {}) == tmp_path / "ckpt"
    assert (tmp_path / "ckpt").read_bytes() == b"01234"
    watch.close()


def test_what_was_renamed_into_its_place_is_whole_and_stays(tmp_path: Path) -> None:
    watch = watched(tmp_path, WrittenNames())
    (tmp_path / "new").write_bytes(b"0123456789")
    (tmp_path / "new").rename(tmp_path / "ckpt")
    events = watch.read()
    assert any(event.is_save for event in events)
    assert tear(events, {}) is None
    assert (tmp_path / "ckpt").read_bytes() == b"0123456789"
    watch.close()


def test_no_moment_is_made_up_in_which_an_earlier_file_was_half_written(tmp_path: Path) -> None:
    watch = watched(tmp_path, WrittenNames())
    (tmp_path / "step-1").write_bytes(b"0123456789")
    (tmp_path / "new").write_bytes(b"step-1")
    (tmp_path / "new").rename(tmp_path / "latest")
    assert tear(watch.read(), {}) is None
    assert (tmp_path / "step-1").read_bytes() == b"0123456789"
    watch.close()


def test_of_a_file_that_was_appended_to_only_the_new_end_can_be_half_there(tmp_path: Path) -> None:
    event = FileEvent(path=tmp_path / "log", is_written=True)
    event.path.write_bytes(b"old line\nnew line\n")
    assert tear([event], {event.path: 9}) == event.path
    assert event.path.read_bytes() == b"old line\nnew "


def test_a_file_that_only_grows_is_a_log_in_every_folder_and_no_checkpoint(tmp_path: Path) -> None:
    names = WrittenNames()
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    watch = watched(first, names)
    for number in range(4):
        with open(first / "log", "a") as file:
            file.write("line\n")
        (first / f"step-{number}").write_text("same")
        (first / "ckpt").write_text(f"{number}")
        watch.read()
    watch.close()
    watch = watched(second, names)
    for name in ("log", "ckpt", "step-9"):
        (second / name).write_text("more")
    saved = {event.path.name for event in watch.read() if event.is_save}
    assert saved == {"ckpt", "step-9"}
    watch.close()


def test_a_folder_that_is_made_later_is_watched_too(tmp_path: Path) -> None:
    watch = watched(tmp_path, WrittenNames())
    (tmp_path / "checkpoints").mkdir()
    watch.read()
    (tmp_path / "checkpoints" / "one").write_text("x")
    assert any(event.is_save for event in watch.read())
    watch.close()


def test_a_file_that_is_read_again_and_again_is_reported_once_in_a_look(tmp_path: Path) -> None:
    (tmp_path / "ckpt").write_text("of an earlier attempt")
    watch = watched(tmp_path, WrittenNames())
    for _ in range(3):
        (tmp_path / "ckpt").read_text()
    assert [event.path.name for event in watch.read() if event.is_read] == ["ckpt"]
    watch.close()


def test_a_watch_tears_the_save_that_it_saw_last(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("old line\n")
    watch = watched(tmp_path, WrittenNames())
    with open(tmp_path / "log", "a") as file:
        file.write("new line\n")
    assert any(event.is_save for event in watch.read())
    assert watch.tear() == "log, half written"
    assert (tmp_path / "log").read_text() == "old line\nnew "
    watch.close()
    watch = watched(tmp_path, WrittenNames())
    (tmp_path / "new").write_text("whole")
    (tmp_path / "new").rename(tmp_path / "ckpt")
    watch.read()
    assert watch.tear() == ""
    watch.close()


def rename_into_place(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.new").write_text(text)
    (folder / f"{name}.new").rename(folder / name)


def test_of_files_that_are_saved_together_the_last_is_left_without_its_name(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    watch = watched(work, WrittenNames())
    for step in ("1", "2"):
        for name in ("model", "optimizer"):
            rename_into_place(work, name, step)
            watch.read()
    assert watch.undo_rename() == "before optimizer had its name"
    assert {path.name: path.read_text() for path in work.iterdir()} == {
        "model": "2",
        "optimizer": "1",
        "optimizer.new": "2",
    }
    watch.close()
    assert list(tmp_path.iterdir()) == [work], "no link is left"


def test_a_file_that_was_not_there_before_is_not_there_again(tmp_path: Path) -> None:
    watch = watched(tmp_path, WrittenNames())
    for name in ("part-0-5", "part-1-5"):
        rename_into_place(tmp_path, name, "5")
    watch.read()
    assert watch.undo_rename() == "before part-1-5 had its name"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part-0-5", "part-1-5.new"]
    watch.close()


@pytest.mark.parametrize("why", ["an older file was removed since", "its version before is not known", "it is gone"])
def test_a_rename_stays_where_the_moment_before_is_not_known(why: str, tmp_path: Path) -> None:
    for name in ("model", "optimizer", "oldest"):
        (tmp_path / name).write_text("0")
    watch = watched(tmp_path, WrittenNames())
    known = ("1", "2") if why != "its version before is not known" else ("2",)
    for step in known:
        for name in ("model", "optimizer"):
            rename_into_place(tmp_path, name, step)
            watch.read()
    if why == "an older file was removed since":
        (tmp_path / "oldest").unlink()
    elif why == "it is gone":
        (tmp_path / "optimizer").rename(tmp_path.with_name("elsewhere"))
    watch.read()
    assert watch.undo_rename() == ""
    assert (tmp_path / "model").read_text() == "2"
    assert not (tmp_path / "optimizer.new").exists()
    watch.close()


def test_a_version_that_came_and_went_unseen_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    watch = watched(tmp_path, WrittenNames())
    for step in ("1", "2", "3"):
        for name in ("model", "optimizer"):
            rename_into_place(tmp_path, name, step)
        if step != "2":
            watch.read()
    assert watch.undo_rename() == ""
    assert (tmp_path / "optimizer").read_text() == "3"
    watch.close()


def test_names_that_were_seen_on_other_machines_are_known_here() -> None:
    names = WrittenNames()
    names.learn(WrittenNames(grown={"log": 2, "ckpt": 3}, replaced={"ckpt"}))
    assert names.is_log("log")
    assert not names.is_log("ckpt")


def test_a_rank_that_goes_back_within_a_round_has_restarted_within_its_processes(tmp_path: Path) -> None:
    lines = [
        {"t": float(t), "attempt": 0, "round": 0, "rank": 0, "step": step} for t, step in enumerate((1, 2, 3, 2, 3))
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    journal = RunJournal(tmp_path, source=Source())
    journal.read()
    back = journal.went_back(1.5, (0, 0))
    assert back is not None
    assert (back.at, back.position) == (3.0, (2,))
    assert journal.went_back(3.5, (0, 0)) is None
    assert journal.went_back(1.5, (0, 1)) is None

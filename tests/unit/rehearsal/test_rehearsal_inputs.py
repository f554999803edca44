"""What a rehearsal reads: names of faults, losses in lines and journals, what was done to files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.rehearsal.injector import FileNames, SavedFiles
from hpc_elastic.rehearsal.journal import LossCurve, LossSource, RunJournal, StepSeen, parse_pattern, step_of_line
from hpc_elastic.rehearsal.judge import KINDS, QUICK, parse_kinds
from hpc_elastic.run.paths import RunPaths


def test_faults_are_named_and_a_wrong_name_is_answered_with_those_there_are() -> None:
    assert [kind.name for kind in parse_kinds("notice, kill-worker,notice")] == ["kill-worker", "notice"]
    assert parse_kinds("all") == KINDS
    assert parse_kinds("quick") == QUICK
    for text in ("meteor", ""):
        with pytest.raises(UsageError, match="fault"):
            parse_kinds(text)


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
    source = LossSource(file="losses.txt", is_asked=True)
    journal = RunJournal(tmp_path / "journal", paths=RunPaths(tmp_path), work=tmp_path, source=source)
    (tmp_path / "losses.txt").write_text("step 1 loss 0.5\nstep 2 lo")
    journal.read()
    with open(tmp_path / "losses.txt", "a") as file:
        file.write("ss 0.25\n")
    journal.read()
    assert [(one.position, one.loss) for one in journal.steps] == [((1,), 0.5), ((2,), 0.25)]
    plain = RunJournal(tmp_path / "journal", paths=RunPaths(tmp_path), work=tmp_path, source=LossSource())
    plain.read()
    assert [one.position for one in plain.steps] == [(9,)]


def test_a_progress_bars_step_counts_once_the_next_one_is_drawn(tmp_path: Path) -> None:
    """tqdm draws a new number with the loss before it, then with its own; or leaves the first out, as time has it."""
    bar = "\rEpoch 0:  50%|#| {}/9 [00:01<00:02, 8.0it/s, loss={}]"
    journal = RunJournal(tmp_path, paths=RunPaths(tmp_path), work=tmp_path, source=LossSource(file="bar.txt"))
    with open(tmp_path / "bar.txt", "w", newline="") as file:
        for step, loss in ((1, 0.5), (2, 0.5), (2, 0.25), (3, 0.125), (4, 0.125)):
            file.write(bar.format(step, loss))
            file.flush()
            journal.read()
    assert [(one.position, one.loss) for one in journal.steps] == [((0, 1), 0.5), ((0, 2), 0.25)]


def test_a_file_that_grows_for_long_is_a_log_in_every_folder_and_a_small_one_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    names = FileNames()
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        (folder / "w").mkdir(parents=True)

    def look(files: SavedFiles) -> bool:
        files._next = 0.0
        return files.look()

    files = SavedFiles([first], names)
    for number in range(4):
        with open(first / "log", "a") as file:
            file.write("line\n" * 1000)
        (first / f"step-{number}").write_text("x" * 500)
        (first / "w" / "ckpt").write_text(f"{number}" * 1000)
        (first / "latest").write_text(f"step-{number}")
        look(files)
        (first / "w" / "ckpt.tmp").write_text("part")
        (first / f"step-{number}").write_text("x" * 1000)  # it was seen while it was written
        assert look(files) or number == 0
    assert not look(files)
    files = SavedFiles([second], names)
    for name in ("log", "latest"):
        (second / name).write_text("more")
        assert not look(files), name
    (second / "step-9").write_text("x" * 1000)
    assert look(files)
    for name, is_one in {"w/ckpt.tmp": True, "new": True, "latest.tmp": False, "log": False}.items():
        assert files.is_checkpoint(second / name) is is_one, name
    assert not files.is_checkpoint(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("printed", "steps", "furthest", "resumed", "redone"),
    [
        (range(1, 41), 40, 12, 11, 2),
        (range(40), 40, 12, 11, 2),
        (range(10, 50, 10), 40, 20, 20, 10),
        (range(0, 50, 10), 41, 20, 20, 10),
        ([1, *range(10, 50, 10)], 40, 20, 20, 10),
        (range(10, 50, 10), 40, 20, 30, 0),
        (range(1001, 1041), 40, 1012, 1011, 2),
    ],
)
def test_steps_are_counted_by_their_numbers_where_not_each_is_reported(
    printed: Iterable[int], steps: int, furthest: int, resumed: int, redone: int
) -> None:
    seen = [StepSeen(at=1.0 + number, place=(0, 0), rank=0, position=(number,)) for number in printed]
    course = LossCurve(seen, started=0.0)
    assert len(course) == steps
    assert course.redone((furthest,), (resumed,)) == redone


def test_steps_of_epochs_are_counted_as_they_are_reported() -> None:
    seen = [StepSeen(at=1.0, place=(0, 0), rank=0, position=(epoch, number)) for epoch in (1, 2) for number in (0, 640)]
    course = LossCurve(seen, started=0.0)
    assert (len(course), course.redone((2, 0), (1, 640))) == (4, 2)


def test_a_rank_that_goes_back_within_a_round_has_restarted_within_its_processes(tmp_path: Path) -> None:
    lines = [
        {"t": float(t), "attempt": 0, "round": 0, "rank": 0, "step": step} for t, step in enumerate((1, 2, 3, 2, 3))
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    journal = RunJournal(tmp_path, paths=RunPaths(tmp_path), work=tmp_path, source=LossSource())
    journal.read()
    back = journal.went_back(1.5, (0, 0))
    assert back is not None
    assert (back.at, back.position) == (3.0, (2,))
    assert journal.went_back(3.5, (0, 0)) is None
    assert journal.went_back(1.5, (0, 1)) is None

"""`checkpoint_dir` and `latest_checkpoint` outside of a run: a folder that all ranks share."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hpc_elastic import checkpoint_dir, latest_checkpoint


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "HPC_ELASTIC_CHECKPOINTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def save(step: int, text: str) -> None:
    with checkpoint_dir(step=step) as folder:
        assert not list(folder.iterdir())
        (folder / "model.pt").write_text(text)


def newest() -> Path:
    found = latest_checkpoint()
    assert found is not None
    return found


def test_the_last_whole_one_is_found() -> None:
    assert latest_checkpoint() is None
    save(9, "nine")
    save(10, "ten")
    with pytest.raises(ValueError, match="half"), checkpoint_dir(11) as folder:
        (folder / "model.pt").write_text("el")
        raise ValueError("half")
    found = newest()
    assert (found.name, (found / "model.pt").read_text()) == ("step-10", "ten")
    assert sorted(os.listdir("checkpoints")) == ["step-10", "step-9"]


def test_a_step_that_is_done_again_takes_the_place_of_the_old_one() -> None:
    save(10, "old")
    save(10, "new")
    found = newest()
    assert (found / "model.pt").read_text() == "new"
    assert os.listdir("checkpoints") == ["step-10"]


def test_one_killed_as_it_replaces_another_leaves_the_old_one() -> None:
    save(10, "old")
    os.rename("checkpoints/step-10", "checkpoints/.old-step-10")
    found = newest()
    assert (found.name, (found / "model.pt").read_text()) == ("step-10", "old")


def test_rank_0_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    other = checkpoint_dir(5)
    (other.__enter__() / "rank1.pt").write_text("one")
    monkeypatch.setenv("RANK", "0")
    first, is_in = checkpoint_dir(5), threading.Event()

    def save() -> None:
        with first as folder:
            (folder / "rank0.pt").write_text("zero")
            is_in.set()

    leaves = threading.Thread(target=save)
    leaves.start()
    assert is_in.wait(30)
    assert latest_checkpoint() is None
    other.__exit__(None, None, None)
    leaves.join(30)
    found = newest()
    assert sorted(os.listdir(found)) == ["rank0.pt", "rank1.pt"]


def test_the_last_to_leave_does_not_move_away_what_rank_0_has_just_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both saw that all had left: the one took the other's new checkpoint for an older one, which was then removed."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    first = checkpoint_dir(5)
    folder = first.__enter__()
    monkeypatch.setenv("RANK", "1")
    last = checkpoint_dir(5)
    last.__enter__()
    (folder.parent / "rank-00000.left").touch()
    with monkeypatch.context() as here:
        here.setattr(os, "rename", lambda *places: pytest.fail(f"moved {places}"))
        last.__exit__(None, None, None)
    first.__exit__(None, None, None)
    assert newest().name == "step-5"


@pytest.mark.parametrize("step", [-1, 1.5, True, None])
def test_a_step_is_a_whole_number(step: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"integer|step"):
        checkpoint_dir(step)  # type: ignore[arg-type]

"""`last_whole_checkpoint` on folders as each framework leaves them, and torn at each place."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest

from hpc_elastic.integrations import last_whole_checkpoint


def torch_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"x" * 500)
        file.writestr("archive/data/0", b"y" * 3000)


def safetensors(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}, "__metadata__": {"a": "b"}})
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(256))


def tear(path: Path, left: float = 0.6) -> None:
    os.truncate(path, int(path.stat().st_size * left))


def trainer(folder: Path, step: int) -> Path:
    """In the order in which transformers' Trainer writes it."""
    path = folder / f"checkpoint-{step}"
    safetensors(path / "model.safetensors")
    (path / "config.json").write_text("{}")
    torch_file(path / "training_args.bin")
    torch_file(path / "optimizer.pt")
    torch_file(path / "rng_state_0.pth")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return path


def name(found: str | None) -> str | None:
    return found and Path(found).name


def test_the_newest_of_transformers_is_that_of_the_highest_step(tmp_path: Path) -> None:
    for step in (500, 1000, 90):
        trainer(tmp_path, step)
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1000")


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "rng_state_0.pth", "trainer_state.json"])
@pytest.mark.parametrize("left", [0.0, 0.6, 0.98])
def test_a_torn_file_tears_its_checkpoint(tmp_path: Path, file: str, left: float) -> None:
    trainer(tmp_path, 500)
    tear(trainer(tmp_path, 1000) / file, left)
    assert name(last_whole_checkpoint(str(tmp_path))) == "checkpoint-500"


def test_transformers_writes_the_trainers_state_last(tmp_path: Path) -> None:
    trainer(tmp_path, 500)
    (trainer(tmp_path, 1000) / "trainer_state.json").unlink()
    assert name(last_whole_checkpoint(tmp_path)) == "checkpoint-500"
    only_weights = tmp_path / "checkpoint-2000"
    safetensors(only_weights / "model.safetensors")
    assert name(last_whole_checkpoint(tmp_path)) == "checkpoint-500"
    torch_file(tmp_path / "checkpoint-3000" / "state.pt")
    assert name(last_whole_checkpoint(tmp_path)) == "checkpoint-3000", "a script's own, of the same name"


def test_all_shards_that_an_index_names_are_needed(tmp_path: Path) -> None:
    trainer(tmp_path, 500)
    path = trainer(tmp_path, 1000)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert name(last_whole_checkpoint(tmp_path)) == "checkpoint-500"
    safetensors(path / "model-2.safetensors")
    assert name(last_whole_checkpoint(tmp_path)) == "checkpoint-1000"


def test_of_lightnings_files_the_newest_whole_one_counts(tmp_path: Path) -> None:
    for at, file in enumerate(["epoch=0-step=10.ckpt", "epoch=1-step=20.ckpt", "last.ckpt"]):
        torch_file(tmp_path / file)
        os.utime(tmp_path / file, ns=(at, at))
    assert name(last_whole_checkpoint(tmp_path)) == "last.ckpt"
    tear(tmp_path / "last.ckpt")
    os.utime(tmp_path / "last.ckpt", ns=(9, 9))
    assert name(last_whole_checkpoint(tmp_path)) == "epoch=1-step=20.ckpt"
    (tmp_path / "last.ckpt").unlink()
    os.utime(tmp_path / "epoch=0-step=10.ckpt", ns=(9, 9))
    assert name(last_whole_checkpoint(tmp_path)) == "epoch=1-step=20.ckpt", "by the steps in the names"
    for at, file in enumerate(["epoch=3-val_loss=0.50.ckpt", "epoch=4-val_loss=0.25.ckpt"]):
        torch_file(tmp_path / file)
        os.utime(tmp_path / file, ns=(at + 20, at + 20))
    assert name(last_whole_checkpoint(tmp_path)) == "epoch=4-val_loss=0.25.ckpt", "a loss is no step"


def test_a_distributed_checkpoint_has_its_metadata_last(tmp_path: Path) -> None:
    for step in (1, 2):
        torch_file(tmp_path / f"step-{step}" / "__0_0.distcp")
    assert last_whole_checkpoint(tmp_path) is None
    (tmp_path / "step-1" / ".metadata").write_bytes(pickle.dumps({}))
    (tmp_path / "step-2" / ".metadata").write_bytes(pickle.dumps({"a": 1})[:-1])
    assert name(last_whole_checkpoint(tmp_path)) == "step-1"


def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    assert last_whole_checkpoint(tmp_path / "missing") is None
    assert last_whole_checkpoint(tmp_path) is None
    torch_file(tmp_path / "step-2" / "model.pt")
    torch_file(tmp_path / "step-9.part" / "model.pt")
    torch_file(tmp_path / "tmp-checkpoint-9" / "model.pt")
    torch_file(tmp_path / "step-10.pt.tmp")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "events.out.9").write_bytes(b"x")
    (tmp_path / "log-99.txt").write_text("x")
    (tmp_path / "step-9").mkdir()
    assert name(last_whole_checkpoint(tmp_path)) == "step-2"

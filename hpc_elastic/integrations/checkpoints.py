"""Finds the last whole checkpoint in a folder: a kill in mid-save leaves one that is torn. No torch.

No checkpoint is loaded. A torch file is a zip archive, whose directory is written at its end; a safetensors file begins
with its sizes; a distributed checkpoint's ``.metadata``, and transformers' trainer_state.json, are written after
everything else (torch 2.13, safetensors 0.7, transformers 5.23).
"""

from __future__ import annotations

import json
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path

_DATA = {".ckpt", ".pt", ".pth", ".bin", ".pkl", ".safetensors", ".distcp"}
"""Suffixes of files with a training's state."""
_MOST_JSON = 100_000_000
"""Bytes: the limit of safetensors for its header."""
_STEP = re.compile(r"step[=_-]?(\d+)")
_TRAILING_NUMBER = re.compile(r"(?:^|[^=\d.])(\d+)$")


def last_whole_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Find the newest checkpoint in `folder` that was written to its end.

    It knows transformers' ``Trainer`` (``checkpoint-500/``), Lightning (``*.ckpt``, files and folders), accelerate
    (``save_state``), distributed checkpoints of torch, and any other file or folder of torch's and safetensors' files.
    Newest is the highest step in the names where all have one, else the time of the last change.

    Each rank may call it before any checkpoint of this start is saved. On a network filesystem a node may see another
    node's file some seconds late: ask on rank 0, and broadcast its answer, where that matters.

    Returns:
        Its path, for ``trainer.train(resume_from_checkpoint=…)`` or ``trainer.fit(ckpt_path=…)``; None without any.
    """
    try:
        found = [path for path in Path(folder).iterdir() if _may_be_one(path)]
    except FileNotFoundError:
        return None
    numbers = {path: _number(path) for path in found}
    by_name = all(number is not None for number in numbers.values())
    found.sort(key=lambda path: ((numbers[path] or 0) if by_name else 0, _changed_ns(path)), reverse=True)
    return next((str(path) for path in found if _is_whole(path)), None)


def _may_be_one(path: Path) -> bool:
    if path.name.startswith((".", "tmp")) or path.name.endswith((".part", ".tmp", ".incomplete")):
        return False
    if path.is_dir():
        return any(file.suffix in _DATA for file in _files(path))
    return path.suffix in _DATA


def _number(path: Path) -> int | None:
    stem = path.name.removesuffix(path.suffix) if path.suffix in _DATA else path.name
    match = _STEP.search(stem) or _TRAILING_NUMBER.search(stem)
    return int(match[1]) if match else None


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # just removed by another rank
        return 0


def _is_whole(path: Path) -> bool:
    try:
        if not path.is_dir():
            return _is_whole_file(path)
        files = list(_files(path))
        if re.fullmatch(r"checkpoint-\d+", path.name):
            # transformers' ``Trainer`` saves these before its state.
            first = ("config.json", "training_args.bin")
            is_trainers = any(file.name in first or file.suffix == ".safetensors" for file in files)
            if is_trainers and not (path / "trainer_state.json").exists():
                return False
        shards = {file.parent for file in files if file.suffix == ".distcp"}
        return all((parent / ".metadata").exists() for parent in shards) and all(map(_is_whole_file, files))
    except OSError:
        return False


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        yield from (Path(root, name) for name in sorted(names))


def _is_whole_file(path: Path) -> bool:
    """Check that a file of a known format has its end; True for any other that is not data."""
    if path.suffix not in _DATA and path.suffix != ".json" and path.name != ".metadata":
        return True
    if not stat.S_ISREG(os.stat(path).st_mode):
        return False  # a FIFO waits for a writer, and to open a device may do anything
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if path.suffix == ".json":
            return size <= _MOST_JSON and _is_whole_json(path, file.read(_MOST_JSON))
        start = file.read(8)
        if not size:
            return False
        if path.suffix == ".safetensors":
            length = int.from_bytes(start, "little")
            if len(start) < 8 or 8 + length > size or length > _MOST_JSON:
                return False
            return 8 + length + _end_of_tensors(file.read(length)) == size
        if start.startswith(b"PK"):
            return zipfile.is_zipfile(file)
        if path.suffix == ".pkl" or path.name == ".metadata":
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"."  # pickle's last opcode
        return True


def _end_of_tensors(header: bytes) -> int:
    """Bytes after a safetensors file's header; -1: it is torn, or another file's."""
    try:
        tensors = json.loads(header)
        return max(
            (int(value["data_offsets"][1]) for name, value in tensors.items() if name != "__metadata__"), default=0
        )
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return -1


def _is_whole_json(path: Path, raw: bytes) -> bool:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return False
    if path.name.endswith(".index.json") and isinstance(value, dict) and isinstance(value.get("weight_map"), dict):
        return all((path.parent / str(shard)).exists() for shard in set(value["weight_map"].values()))
    return True

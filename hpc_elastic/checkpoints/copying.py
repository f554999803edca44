"""Copies a part's files to the shared filesystem, and commits a checkpoint once all parts are there."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path

from hpc_elastic.base import codec
from hpc_elastic.checkpoints.layout import INDEX_NAME, CopiedFile, Index, Manifest, Saving, remove, walk
from hpc_elastic.errors import HpcElasticError

CHUNK = 1 << 20


class CopyError(HpcElasticError):
    template = "{name}: {why}"


def copy_part(source: Path, files: Path, *, tag: str, pace: Callable[[int], object]) -> dict[str, CopiedFile]:
    """Each file is there under its name when it is whole and on the disk. `tag` names this copier's temporary files;
    `pace` is called with the bytes that were just read, and may wait, or raise to stop.
    """
    found = {}
    for name in walk(source):
        target = files / name
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name[:100]}.{tag}")
        try:
            found[name] = copy_file(source / name, temporary, pace)
            os.rename(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    _sync(files)
    return found


def copy_file(source: Path, target: Path, pace: Callable[[int], object]) -> CopiedFile:
    with open(source, "rb", buffering=0) as reader, open(target, "wb", buffering=0) as writer:
        size = crc = 0
        while chunk := reader.read(CHUNK):
            view = memoryview(chunk)
            while view:
                view = view[writer.write(view) :]
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
            pace(len(chunk))
        os.fsync(writer.fileno())
    return CopiedFile(size, crc)


def manifest_path(target: Path, index: int, *, without: bool = False) -> Path:
    return target / "parts" / f"part-{index:05d}{'.without' if without else ''}.json"


def commit(shared: Path, target: Path, saving: Saving, run_id: str) -> Index | None:
    """Whoever sees all parts may do it; the first one wins. None: another node has done it, or a manifest can't be read
    yet. CopyError: two nodes wrote different files of the same name.
    """
    files: dict[str, CopiedFile] = {}
    for index in range(saving.count):
        manifest = codec.load(manifest_path(target, index), Manifest)
        if not isinstance(manifest, Manifest):
            return None
        for name, facts in manifest.files.items():
            if files.setdefault(name, facts) != facts:
                raise CopyError(name=name, why="two nodes wrote different files of this name; put the rank into it")
    found = Index(run_id=run_id, saving=saving, files=files)
    try:
        codec.save(target / "files" / INDEX_NAME, found, durable=True)
        os.rename(target / "files", shared / f"step-{saving.step}")
    except FileNotFoundError:
        return None
    _sync(shared)
    remove(target)
    return found


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

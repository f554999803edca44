"""Writes the files of a folded attempt back to where they were, for tests that look into them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hpc_elastic.base.files import OUTPUT, RECORDS, open_file, read_parts
from hpc_elastic.output.log_files import STDOUT
from hpc_elastic.output.log_streams import round_numbers, streams_of
from hpc_elastic.run.paths import AttemptPaths


def printed(attempt: Path) -> list[str]:
    """What each rank printed to stdout in each round, also while the supervisor folds the run."""
    paths = AttemptPaths(attempt)
    streams = (one for index in round_numbers(paths) for one in streams_of(paths, index, streams=(STDOUT,)))
    texts = []
    for stream in streams:
        with suppress(FileNotFoundError), open(open_file(stream.path), encoding="utf-8") as file:
            texts.append(file.read())
    return texts


def unfold(attempt: Path) -> None:
    """For a run whose processes have ended."""
    for folded in (attempt / OUTPUT, attempt / RECORDS):
        for name, (at, size) in read_parts(folded).items():
            path, data = attempt / name, folded.read_bytes()[at : at + size]
            for parent in reversed(path.relative_to(attempt).parents):
                (attempt / parent).mkdir(mode=0o700, exist_ok=True)
            if name.startswith("store/") and not name.startswith("store/hb/"):
                with suppress(FileExistsError):  # a cache has it still
                    path.symlink_to(data.decode())
            elif not path.exists():
                path.write_bytes(data)
        folded.unlink(missing_ok=True)

"""Writes the files of a folded attempt back to where they were, for tests that look into them."""

from __future__ import annotations

from pathlib import Path

from hpc_elastic.base.folded import OUTPUT, RECORDS, read_parts


def unfold(attempt: Path) -> Path:
    for folded in (attempt / OUTPUT, attempt / RECORDS):
        for name, (at, size) in read_parts(folded).items():
            path, data = attempt / name, folded.read_bytes()[at : at + size]
            for parent in reversed(path.relative_to(attempt).parents):
                (attempt / parent).mkdir(mode=0o700, exist_ok=True)
            if name.startswith("store/") and not name.startswith("store/hb/"):
                path.symlink_to(data.decode())
            elif not path.exists():
                path.write_bytes(data)
        folded.unlink(missing_ok=True)
    return attempt

"""What rigs left whose owner was killed, and whose keeper was killed too: found by their folders, and taken away."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path

from tests.rigs.network_mounts.location import remove

PREFIX = "network-mounts-"
_OWNER = "owner.json"


def write_owner(folder: Path, *, owner: int | None, keeper: int) -> None:
    """Note whose rig it is; `owner` None: nobody's, it stays until it is taken down."""
    processes = {"owner": owner and _birth(owner), "keeper": _birth(keeper)}
    (folder / _OWNER).write_text(json.dumps(processes))


def remove_leftovers() -> None:
    """Take away each rig whose owner and keeper do not both live."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            noted = json.loads((folder / _OWNER).read_text())
        except (OSError, ValueError):
            continue  # just being made
        if _lives(noted["keeper"]) and (noted["owner"] is None or _lives(noted["owner"])):
            continue
        take_down(folder)


def take_down(folder: Path) -> None:
    """End a rig's keeper, and with it all its processes; remove its mounts and its folder."""
    try:
        noted = json.loads((folder / _OWNER).read_text())
    except (OSError, ValueError):
        noted = {"keeper": None}
    if noted["keeper"] and _lives(noted["keeper"]):
        os.kill(int(noted["keeper"][0]), signal.SIGKILL)
    remove(folder)


def _birth(pid: int) -> list[int]:
    """The pid, and when it began: another process that gets the same pid later began later.

    Raises:
        OSError: it has ended, whether or not its parent has taken notice.
    """
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if words[0] in "ZX":
        raise ProcessLookupError(pid)
    return [pid, int(words[19])]


def _lives(noted: list[int]) -> bool:
    try:
        return _birth(noted[0]) == noted
    except OSError:
        return False

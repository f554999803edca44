"""What is remembered of nodes: nodes.json in the run directory, and one file for each attempt in the account's folder.

The account's files lie under ``$XDG_STATE_HOME/hpc_elastic/nodes``. Each is written once, whole, under a name of its
own, so an attempt's end needs no lock on a filesystem that may have none. What rewrites them (``--forget-nodes``) holds
a lock of this host. Whatever can't be read counts for nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.files import read_json, write_json
from hpc_elastic.base.host_lock import host_lock, host_lock_path
from hpc_elastic.errors import UsageError
from hpc_elastic.run.index import account_folder, make_account_folder
from hpc_elastic.run.node_score import Evidence
from hpc_elastic.run.option_values import MOST_HOURS

MOST_FILES = 2000
"""Of an account: the newest are read."""
MOST_EVIDENCE = 2000
"""In one file: the latest are kept."""
LOCK = "forget-nodes"
LOCK_SECONDS = 10.0
"""How long another process of this host that forgets nodes is waited for."""
_LIMIT = 4 << 20
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_NAME = re.compile(r"(\d{10,20})-.*\.json\Z")


class NodeRecord(Struct, frozen=True, kw_only=True):
    """What one file holds."""

    evidence: tuple[Evidence, ...] = ()
    excluded: tuple[str, ...] = ()
    """The nodes that this program has put on the job's list of excluded ones, and not the user."""
    saved_ns: int = 0
    """When it was written, by the writer's wall clock."""
    problem: str = ""
    """Why the file could not be read; empty where it was, or where there is none."""


class _Remembered(Struct, frozen=True, kw_only=True):
    """A file of the account: what one attempt saw."""

    cluster: str
    evidence: tuple[Evidence, ...]


def load_record(path: Path) -> NodeRecord:
    """Read a file. Never raises."""
    value = read_json(path, limit=_LIMIT)
    if isinstance(value, str):
        return NodeRecord(problem="" if value == "missing" else str(value))
    if problem := codec.version_problem(value):
        return NodeRecord(problem=problem)
    evidence = codec.readable_items(Evidence, value.get("evidence"))
    rest = codec.readable_fields(NodeRecord, {**value, "evidence": (), "problem": ""})
    return NodeRecord(**{**rest, "evidence": tuple(item for item in evidence if item.node)})


def save_record(path: Path, record: NodeRecord) -> None:
    """Write a file whole. Raises OSError."""
    latest = sorted(dict.fromkeys(record.evidence), key=lambda item: item.at_ns)[-MOST_EVIDENCE:]
    codec.save(path, replace(record, evidence=tuple(latest)), without=("problem",))


# -- the account's ----------------------------------------------------------------------------------------------------


def remember(
    evidence: Collection[Evidence], *, cluster: str, run_id: str, attempt: int, now_ns: int, env: Mapping[str, str]
) -> str | None:
    """Put what an attempt saw into the account's folder.

    Args:
        evidence: What it saw.
        cluster: Slurm's name of it, or empty.
        run_id: The run.
        attempt: Its number.
        now_ns: The wall clock.
        env: For XDG_STATE_HOME and HOME.

    Returns:
        None, or why it could not be remembered.
    """
    try:
        folder = make_account_folder("nodes", env)
        _drop_old(folder, now_ns)
        name = f"{now_ns}-{_UNSAFE.sub('-', cluster) or '-'}-{_UNSAFE.sub('-', run_id)}-{attempt}.json"
        codec.save(folder / name, _Remembered(cluster=cluster, evidence=tuple(evidence)))
        return None
    except (OSError, UsageError) as error:
        return str(error)


def account_evidence(env: Mapping[str, str], *, cluster: str = "") -> tuple[Evidence, ...]:
    """What this account remembers of a cluster's nodes; of all clusters where it is empty. Never raises."""
    folder = account_folder("nodes", env)
    found: list[Evidence] = []
    for name in _names(folder)[-MOST_FILES:]:
        assert folder is not None
        path = folder / name
        value = read_json(path, limit=_LIMIT)
        if isinstance(value, str) or (cluster and value.get("cluster") not in (cluster, "")):
            continue
        found += load_record(path).evidence
    return tuple(dict.fromkeys(found))


def forget(env: Mapping[str, str], nodes: Collection[str] | None) -> int:
    """Forget what the account remembers of these nodes; of all where None.

    Returns:
        Of how many things.

    Raises:
        OSError: a file can't be changed.
    """
    folder = account_folder("nodes", env)
    if folder is None:
        return 0
    with host_lock(host_lock_path(LOCK), seconds=LOCK_SECONDS):
        return sum(_forget_in(folder / name, nodes, remove=True) for name in _names(folder))


def forget_in(path: Path, nodes: Collection[str] | None) -> int:
    """Forget nodes in one file; all of them where None.

    Args:
        path: The file.
        nodes: Whom.

    Returns:
        How many things were in it about them.

    Raises:
        OSError: the file can't be changed.
    """
    with host_lock(host_lock_path(LOCK), seconds=LOCK_SECONDS):
        return _forget_in(path, nodes, remove=False)


def _forget_in(path: Path, nodes: Collection[str] | None, *, remove: bool) -> int:
    """The same under a lock that the caller holds; `remove`: a file that holds nothing then is removed."""
    value = read_json(path, limit=_LIMIT)
    if isinstance(value, str):
        return 0
    listed = value.get("evidence")
    known = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    kept = [] if nodes is None else [item for item in known if item.get("node") not in nodes]
    if len(kept) == len(known):
        return 0
    if remove and not kept:
        path.unlink(missing_ok=True)  # `_drop_old` of a job that ends now, or another host's user, was faster
    else:
        write_json(path, {**value, "evidence": kept})
    return len(known) - len(kept)


def _names(folder: Path | None) -> list[str]:
    """Oldest first."""
    try:
        names = os.listdir(folder) if folder is not None else []
    except OSError:
        return []
    found = [(int(match.group(1)), name) for name in names if (match := _NAME.match(name))]
    return [name for _, name in sorted(found)]


def _drop_old(folder: Path, now_ns: int) -> None:
    """Nothing in them counts any more, whatever ``hours`` is."""
    for name in _names(folder):
        match = _NAME.match(name)
        if match is None or int(match.group(1)) > now_ns - int(MOST_HOURS * 3600e9):
            return
        try:
            (folder / name).unlink(missing_ok=True)  # another job that ends now does the same
        except OSError:
            return


def merged(*parts: Iterable[Evidence]) -> tuple[Evidence, ...]:
    """All of them, each once."""
    return tuple(dict.fromkeys(item for part in parts for item in part))

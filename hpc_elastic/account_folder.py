"""Where a person's account keeps what outlives a run: which jobs there were, which nodes were bad."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from hpc_elastic.atomic_file import make_private_dir
from hpc_elastic.errors import UsageError


def account_folder(name: str, env: Mapping[str, str] | None = None) -> Path | None:
    """The folder for one kind of files, below ``$XDG_STATE_HOME``; None where the account has no home.

    As root, a state folder that is not root's alone is not used, but the one in root's own home: ``sudo`` may keep the
    user's HOME, where root's files would be in the user's way, and what the user puts there is not to lead root.

    Args:
        name: Of the folder.
        env: Of the process; by default this one's.
    """
    env = os.environ if env is None else env
    state = env.get("XDG_STATE_HOME", "")
    if not state.startswith("/"):
        home = env.get("HOME", "")
        if not home.startswith("/"):
            return None
        state = home + "/.local/state"
    if os.geteuid() == 0 and not _is_roots(Path(state)):
        try:
            state = pwd.getpwuid(0).pw_dir + "/.local/state"
        except KeyError:
            return None
    return Path(state) / "hpc_elastic" / name


def make_account_folder(name: str, env: Mapping[str, str] | None = None) -> Path:
    """The same folder, made with those above it that are missing, all for this user alone.

    Raises:
        UsageError: there is no home, or a folder is another user's or open to others.
        OSError: it can't be made.
    """
    folder = account_folder(name, env)
    if folder is None:
        raise UsageError("neither XDG_STATE_HOME nor HOME is set")
    for above in reversed(folder.parent.parents):
        above.mkdir(mode=0o700, exist_ok=True)
    make_private_dir(folder.parent)
    make_private_dir(folder)
    return folder


def _is_roots(path: Path) -> bool:
    """Whether only root can have put there what is at `path`, or what will be."""
    try:
        return all(not os.path.lexists(above) or os.lstat(above).st_uid == 0 for above in (path, *path.parents))
    except OSError:  # NFS refuses root
        return False

"""Where a person's account keeps what outlives a run: which jobs there were, which nodes were bad."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def account_folder(name: str, env: Mapping[str, str] | None = None) -> Path | None:
    """The folder for one kind of files, below ``$XDG_STATE_HOME``; None where the account has no home.

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
    return Path(state) / "hpc_elastic" / name

"""What file a command names, and what to tell a user whose command did not start. Pure."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping

from hpc_elastic.errors import HpcElasticError


class WorkerStartError(HpcElasticError):
    """A worker's process could not be started. `errno` is the system's code; `command` is what was to run."""

    template = "cannot start {command!r}: {reason}"


def candidates(command: str, env: Mapping[str, str]) -> list[str]:
    """The paths to try for `command`, in order, as execvp does: a name with a slash is a path, any other goes by PATH.

    Relative ones mean: from the worker's working directory.
    """
    if "/" in command:
        return [command]
    return [os.path.join(folder or ".", command) for folder in env.get("PATH", os.defpath).split(":")]


def find_program(command: str, env: Mapping[str, str] | None = None) -> str | None:
    """The first of `candidates` that may be executed. (What `shutil.which` does, without its imports.)"""
    for path in candidates(command, os.environ if env is None else env):
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
    return None


def exec_failure(*, command: str, cwd: str, path: str, code: int, path_exists: bool) -> WorkerStartError:
    """Say why a command did not start.

    Args:
        command: As the user gave it.
        cwd: The worker's working directory.
        path: The file that was tried last, or the folder, for a `cwd` that could not be entered.
        code: The errno.
        path_exists: Whether there is something at `path` after all.
    """
    if code == errno.EACCES and "/" not in command and not path_exists:
        code = errno.ENOENT  # not that file is forbidden, but a folder in PATH is closed to us
    text = os.strerror(code)
    if path == cwd:
        reason = f"its working directory {cwd!r} cannot be entered: {text}"
    elif code == errno.ENOENT and path_exists:
        reason = f"{path!r} is there, but the interpreter that its first line ('#!') names is not"
    elif code in (errno.ENOENT, errno.ENOTDIR) and "/" not in command:
        reason = "no such command in PATH; give its path, or load the module or environment that has it"
    elif code in (errno.ENOENT, errno.ENOTDIR):
        reason = f"there is no such file (looked from {cwd!r})"
    elif code == errno.EACCES:
        reason = f"{path!r} may not be executed: {text}; run: chmod +x {path}"
    elif code == errno.ENOEXEC:
        reason = f"{path!r} is not a program: no '#!' in its first line, or built for another machine"
    elif code == errno.E2BIG:
        reason = "its arguments and environment are longer than this system allows together"
    else:
        reason = f"{path}: {text}"
    return WorkerStartError(command=command, reason=reason, errno=code)

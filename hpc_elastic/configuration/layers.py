"""The layers of the configuration: which files there are, and which of them gives each option its value.

From the lowest: defaults, the site's file, the user's, the project's; a profile's tables of the same files; the
environment; the command line, or a program's arguments.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hpc_elastic.errors import UnsafePathError, UsageError

SITE_VARIABLE, USER_VARIABLE, PROJECT_VARIABLE = (f"HPC_ELASTIC_{name}_CONFIG" for name in ("SITE", "USER", "PROJECT"))
PROFILE_VARIABLE = "HPC_ELASTIC_PROFILE"
_OWN_NAME, _PYPROJECT = "hpc_elastic.toml", "pyproject.toml"
_OWN_TABLE: tuple[tuple[str, ...], ...] = ((),)
_PYPROJECT_TABLES = (("tool", "hpc-elastic"), ("tool", "hpc_elastic"))


class Layer(str, Enum):
    """Who gives a value; later ones win."""

    DEFAULT = "default"
    SITE = "site"
    USER = "user"
    PROJECT = "project"
    ENVIRONMENT = "environment"
    COMMAND_LINE = "command line"


FILE_LAYERS = (Layer.SITE, Layer.USER, Layer.PROJECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A file that may hold a layer."""

    layer: Layer
    path: Path
    tables: tuple[tuple[str, ...], ...] = _OWN_TABLE
    """As `settings_file.read_settings` takes them."""
    required: bool = False
    """Named by a variable: its absence is an error."""


def candidates(env: Mapping[str, str], here: Path) -> list[Candidate]:
    """The files that are looked at, lowest layer first; of the project's, from `here` upwards, the first counts.

    Args:
        env: For HOME, XDG_CONFIG_DIRS, XDG_CONFIG_HOME, and the variables that name a file (empty: none).
        here: The working directory, absolute.
    """
    return [*_site(env), *_user(env), *_project(env, here)]


def there(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that exist.

    Raises:
        UsageError: a file that a variable names is not there.
    """
    present = []
    for candidate in found:
        try:
            os.stat(candidate.path)
        except OSError as error:
            if candidate.required:
                variable = f"HPC_ELASTIC_{candidate.layer.value.upper()}_CONFIG"
                raise UsageError(f"{variable}={candidate.path}: {error.strerror}") from None
            continue
        present.append(candidate)
    return present


def is_trusted_by_name(candidate: Candidate) -> bool:
    """Whether a file is obeyed whosever it is: a variable names it, so the user says so. Root trusts root's files only.

    What others say would be executed in the user's name (``python``, ``health-check``), and in /tmp anybody may plant a
    file above the working directory.
    """
    return candidate.required and os.geteuid() != 0


def way_out(candidate: Candidate, error: UnsafePathError) -> str:
    """What lets a user go on who has such a file in the way."""
    variable = f"HPC_ELASTIC_{candidate.layer.value.upper()}_CONFIG"
    leave_out = f"to leave it out, set {variable}= (empty)"
    if "owner" not in error.facts:
        return leave_out
    if os.geteuid() == 0:
        return f"root reads root's own files only; {leave_out}"
    return f"if you trust it: export {variable}={candidate.path}; {leave_out}"


def _site(env: Mapping[str, str]) -> list[Candidate]:
    if SITE_VARIABLE in env:
        return _named(env[SITE_VARIABLE], Layer.SITE)
    folders = (env.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    for folder in folders:
        path = Path(folder, "hpc_elastic", "config.toml")
        if folder.startswith("/") and os.path.exists(path):
            return [Candidate(layer=Layer.SITE, path=path)]
    absolute = [folder for folder in folders if folder.startswith("/")]
    return [Candidate(layer=Layer.SITE, path=Path(absolute[0], "hpc_elastic", "config.toml"))] if absolute else []


def _user(env: Mapping[str, str]) -> list[Candidate]:
    if USER_VARIABLE in env:
        return _named(env[USER_VARIABLE], Layer.USER)
    folder = env.get("XDG_CONFIG_HOME", "")
    if not folder.startswith("/"):
        home = env.get("HOME", "")
        if not home.startswith("/"):
            return []
        folder = home + "/.config"
    return [Candidate(layer=Layer.USER, path=Path(folder, "hpc_elastic", "config.toml"))]


def _project(env: Mapping[str, str], here: Path) -> list[Candidate]:
    """From `here` to the folder with the repository, the home folder or the root, all included."""
    if PROJECT_VARIABLE in env:
        return _named(env[PROJECT_VARIABLE], Layer.PROJECT)
    found = []
    home = env.get("HOME")
    for folder in (here, *here.parents):
        found.append(Candidate(layer=Layer.PROJECT, path=folder / _OWN_NAME))
        found.append(Candidate(layer=Layer.PROJECT, path=folder / _PYPROJECT, tables=_PYPROJECT_TABLES))
        if os.path.exists(folder / ".git") or str(folder) == home:
            break
    return found


def _named(text: str, layer: Layer) -> list[Candidate]:
    if not text:
        return []
    path = Path(os.path.abspath(text))
    tables = _PYPROJECT_TABLES if path.name == _PYPROJECT else _OWN_TABLE
    return [Candidate(layer=layer, path=path, tables=tables, required=True)]

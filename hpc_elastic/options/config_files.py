"""The configuration files: which there are, lowest layer first, and one of them read, with the line of each value.

From the lowest: defaults, the site's file, the user's, the project's; a profile's tables of the same files; the
environment; the command line, or a program's arguments (`resolve`).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from hpc_elastic.base.files import Owner, open_checked, read_from
from hpc_elastic.errors import UnsafePathError, UsageError
from hpc_elastic.options.table import Keys, key_of, texts_of

SITE_VARIABLE = "HPC_ELASTIC_SITE_CONFIG"
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


class Candidate(Struct, frozen=True, kw_only=True):
    layer: Layer
    path: Path
    tables: tuple[tuple[str, ...], ...] = _OWN_TABLE
    required: bool = False
    """Named by a variable: its absence is an error."""


def candidates(env: Mapping[str, str], here: Path) -> list[Candidate]:
    """`env` has HOME, XDG_CONFIG_DIRS, XDG_CONFIG_HOME, and the variables that name a file (empty: none)."""
    found = []
    for layer in FILE_LAYERS:
        named = env.get(_variable_of(layer))
        if named is None:
            found += _usual(layer, env, here)
        elif named:
            path = Path(os.path.abspath(named))
            tables = _PYPROJECT_TABLES if path.name == _PYPROJECT else _OWN_TABLE
            found.append(Candidate(layer=layer, path=path, tables=tables, required=True))
    return found


def _variable_of(layer: Layer) -> str:
    return f"HPC_ELASTIC_{layer.value.upper()}_CONFIG"


def _usual(layer: Layer, env: Mapping[str, str], here: Path) -> list[Candidate]:
    home = env.get("HOME", "")
    if layer is Layer.SITE:
        folders = (env.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
        paths = [Path(folder, "hpc_elastic", "config.toml") for folder in folders if folder.startswith("/")]
        there = [*filter(os.path.exists, paths), *paths]
        return [Candidate(layer=layer, path=path) for path in there[:1]]
    if layer is Layer.USER:
        usual = f"{home}/.config" if home.startswith("/") else ""
        own = env.get("XDG_CONFIG_HOME", "")
        chosen = Path(own if own.startswith("/") else usual, "hpc_elastic", "config.toml")
        return [Candidate(layer=layer, path=chosen)] if chosen.is_absolute() else []
    found = []
    for folder in (here, *here.parents):
        found.append(Candidate(layer=layer, path=folder / _OWN_NAME))
        found.append(Candidate(layer=layer, path=folder / _PYPROJECT, tables=_PYPROJECT_TABLES))
        if os.path.exists(folder / ".git") or str(folder) == home:
            break
    return found


def there(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that exist; raises UsageError where a file that a variable names does not."""
    present = []
    for candidate in found:
        try:
            os.stat(candidate.path)
        except OSError as error:
            if candidate.required:
                raise UsageError(f"{_variable_of(candidate.layer)}={candidate.path}: {error.strerror}") from None
            continue
        present.append(candidate)
    return present


def way_out(candidate: Candidate, error: UnsafePathError) -> str:
    variable = _variable_of(candidate.layer)
    leave_out = f"to ignore it, set {variable}= (empty)"
    if "owner" not in error.facts:
        return leave_out
    if os.geteuid() == 0:
        return f"root reads root's own files only; {leave_out}"
    return f"if you trust it: export {variable}={candidate.path}; {leave_out}"


PROFILES, DEFAULT_PROFILE = "profile", "default-profile"
_MAX_BYTES = 256 << 10
_MAX_SEARCHED = 4 << 20
_PROFILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


class Setting(Struct, frozen=True, kw_only=True):
    texts: tuple[str, ...]
    """Words of the command line; empty: as if it was given nowhere."""
    called: str
    """``/etc/hpc.toml:3: nodes =``: how a message about the value names it."""
    where: str


class SettingsFile(Struct, frozen=True, kw_only=True):
    path: Path
    base: Mapping[str, Setting] = field(default_factory=dict)
    profiles: Mapping[str, Mapping[str, Setting]] = field(default_factory=dict)
    default_profile: str | None = None


def read_settings(
    path: Path, keys: Keys, *, tables: tuple[tuple[str, ...], ...] = _OWN_TABLE, any_owner: bool = False
) -> SettingsFile | None:
    """Our keys are in the first of `tables` that is there; None: none is. `any_owner`: the user has named this file."""
    data = _read(path, tables, any_owner=any_owner)
    if data is None:
        return None
    value = _parse(path, data)
    for table in tables:
        found: Any = value
        for name in table:
            found = found.get(name) if isinstance(found, dict) else None
        if isinstance(found, dict):
            return _Reader(path, data.decode("utf-8"), keys, table).read(found)
        if found is not None:
            raise UsageError(f"{path}: {'.'.join(table)} is not a table; write [{'.'.join(table)}]")
    return None


def _read(path: Path, tables: tuple[tuple[str, ...], ...], *, any_owner: bool) -> bytes | None:
    """The file, which is no larger than a person writes; None: it does not mention us, so need not be understood."""
    try:
        fd = open_checked(path, owner=Owner.ANY, links=Owner.ANY if any_owner else Owner.TRUSTED)
        try:
            info = os.fstat(fd)
            if not any_owner and () in tables:
                _check_trusted(path, info)
            data = read_from(fd, _MAX_SEARCHED + 1)
        finally:
            os.close(fd)
        is_searched = len(data) <= _MAX_SEARCHED
        if is_searched and not any(not table or table[-1].encode() in data for table in tables):
            return None
        try:
            if not any_owner:
                _check_trusted(path, info)
        except UnsafePathError:
            keys = _lines_of_keys(data[:_MAX_BYTES].decode("utf-8", "replace"))
            if not any(key[: len(table)] == table for key in keys for table in tables):
                return None  # our name is that of a dependency, say
            raise
    except UnsafePathError as error:
        owner = {"owner": error.owner} if "owner" in error.facts else {}
        raise UnsafePathError(f"configuration not read: {error}", **owner) from None
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(str(path)) from None
    except OSError as error:
        raise UnsafePathError(f"the configuration {path} can't be read: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise UsageError(f"the configuration {path} is larger than {_MAX_BYTES} bytes")
    return data


def _check_trusted(path: Path, info: os.stat_result) -> None:
    if info.st_uid not in (0, os.geteuid()):
        why = f"belongs to uid {info.st_uid}, not to you (uid {os.geteuid()})"
        raise UnsafePathError(f"{path} {why}", owner=info.st_uid)
    if info.st_mode & stat.S_IWOTH:
        # Who may write to a file of root's may also link it to another name.
        raise UnsafePathError(f"{path} can be written by every user; run: chmod o-w {path}")


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    import sys

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        value: dict[str, Any] = tomllib.loads(data.decode("utf-8"))
        return value
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}:{line}: not UTF-8, so not TOML") from None
    except tomllib.TOMLDecodeError as error:
        found = re.search(r" \(at line (\d+), column \d+\)", str(error))
        where = f"{path}:{found[1]}" if found else str(path)
        why = str(error)[: found.start()] if found else str(error)
        raise UsageError(f"{where}: invalid TOML: {why} (strings need quotes)") from None
    except RecursionError:
        raise UsageError(f"{path}: nested too deeply") from None


class _Reader:
    def __init__(self, path: Path, text: str, keys: Keys, table: tuple[str, ...]) -> None:
        self._path, self._keys, self._table = path, keys, table
        self._lines = _lines_of_keys(text)

    def read(self, value: Mapping[str, Any]) -> SettingsFile:
        default = None
        base: dict[str, Any] = {}
        profiles: dict[str, Mapping[str, Setting]] = {}
        for name, item in value.items():
            plain = name.replace("_", "-")
            if plain == DEFAULT_PROFILE:
                if not (isinstance(item, str) and item):
                    raise UsageError(f"{self._at((), name)}: {name} = {item}: give a profile's name")
                default = item
            elif plain == PROFILES:
                profiles = self._profiles(name, item)
            else:
                base[name] = item
        return SettingsFile(path=self._path, base=self._settings((), base), profiles=profiles, default_profile=default)

    def _profiles(self, key: str, value: object) -> dict[str, Mapping[str, Setting]]:
        where = self._at((), key)
        if not isinstance(value, dict):
            raise UsageError(f"{where}: {key} is not a table; write [{'.'.join((*self._table, key))}.NAME]")
        for name, item in value.items():
            wrong = "" if _PROFILE_NAME.match(name) else "its name has letters, digits, '.', '_' and '-'"
            wrong = wrong if isinstance(item, dict) else "it is not a table"
            if wrong:
                raise UsageError(f"{self._at((key,), name)}: {key}.{name}: {wrong}; write [{key}.NAME]")
        return {name: self._settings((key, name), item) for name, item in value.items()}

    def _settings(self, inner: tuple[str, ...], values: Mapping[str, Any]) -> dict[str, Setting]:
        found: dict[str, Setting] = {}
        for name, value in values.items():
            where = self._at(inner, name)
            option = self._keys.find(name)
            if option is None:
                from hpc_elastic.options.worker_options import removal

                if (why := removal(name)) is not None:
                    raise UsageError(f"{where}: {name} {why}")
                others = () if inner else (PROFILES, DEFAULT_PROFILE)
                nearest = self._keys.nearest(name, others)
                hint = f"did you mean {nearest}?" if nearest else "hpc-elastic config --all lists them"
                raise UsageError(f"{where}: unknown key {name}; {hint}")
            if not option.in_files:
                raise UsageError(f"{where}: {name} is allowed on the command line only")
            if option.dest in found:
                raise UsageError(f"{where}: {name} is {key_of(option)} once more; give one of them")
            texts = texts_of(option, value, called=f"{where}: {name}")
            found[option.dest] = Setting(texts=texts, called=f"{where}: {name} =", where=where)
        return found

    def _at(self, inner: tuple[str, ...], name: str) -> str:
        line = self._lines.get((*self._table, *inner, name))
        return f"{self._path}:{line}" if line else str(self._path)


_HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(#.*)?$")
_KEY = re.compile(r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r""""([^"]*)"|'([^']*)'|([A-Za-z0-9_-]+)""")


def _lines_of_keys(text: str) -> dict[tuple[str, ...], int]:
    """The line of each key, which tomllib does not give. A multi-line string may hide one, no more."""
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        header = _HEADER.match(line)
        if header:
            table = _parts(header[1])
            for end in range(1, len(table) + 1):
                lines.setdefault(table[:end], number)
            continue
        key = _KEY.match(line)
        if key:
            lines.setdefault((*table, *_parts(key[1])), number)
    return lines


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part[1] or part[2] or part[3] for part in _PART.finditer(dotted))

"""Puts the layers together: for each option the value that wins, and where it came from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.errors import UnsafePathError, UsageError
from hpc_elastic.options import config_files
from hpc_elastic.options.config_files import FILE_LAYERS, Candidate, Layer, SettingsFile, read_settings
from hpc_elastic.options.table import (
    VARIABLE_PREFIX,
    Keys,
    Option,
    Parsed,
    key_of,
    texts_of,
    texts_of_variable,
    variable_of,
)

NOT_SETTINGS = frozenset(
    VARIABLE_PREFIX + name
    for name in (
        "RUN_DIR", "ATTEMPT", "JOB_ID", "HEARTBEAT", "HEARTBEAT_DIR", "TAG", "NODE_TAG", "NODE", "HOST", "LAST_ROUND",
        "JOURNAL", "OUTCOME", "EXIT_CODE", "REASON", "ROOT_CAUSE", "REPORT", "NOTIFY_URL", "COMMAND_TOKEN", "TORCH",
        "REQUIRE_SLURM", "REQUIRE_FRAMEWORKS", "SLURM_FS", "BENCH", "PROFILE", "SITE_CONFIG", "USER_CONFIG",
        "PROJECT_CONFIG", "TRUST_COPIES", "CHECKPOINTS",
    )
)  # fmt: skip
"""HPC_ELASTIC_* variables that are not options: docs/reference/environment.md lists them."""


class Origin(Struct, frozen=True, kw_only=True):
    layer: Layer
    where: str
    """``--nodes``, ``PET_NNODES``, ``/etc/hpc.toml:3``."""
    profile: str | None = None


class Resolved(Struct, frozen=True, kw_only=True):
    parsed: Parsed
    """Reads as if all had stood on the command line; `Parsed.sources` names the true ones."""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """`Option.dest` → its source, where some layer above the defaults gives it."""
    files: tuple[tuple[Candidate, str], ...] = ()
    """Each with its state: ``read``, ``not there``, or why it does not count."""
    profile: str | None = None


class _Values(Struct):
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)

    def put(self, option: Option, texts: tuple[str, ...], *, called: str, origin: Origin) -> None:
        for name in option.names:
            self.named.pop(name, None)
        self.origins[option.dest] = origin
        if not texts:
            self.values.pop(option.dest, None)
            self.sources.pop(option.dest, None)
            return
        self.values[option.dest] = texts
        self.sources[option.dest] = called
        if not called.startswith("-"):
            self.named.update(dict.fromkeys(option.names, called))


def resolve(
    given: Parsed,
    options: Sequence[Option],
    *,
    env: Mapping[str, str],
    here: Path,
    left_out: Sequence[str] = (),
    yields: Mapping[str, Sequence[str]] | None = None,
) -> Resolved:
    """Fill in what `given`, a command line or a program's `arguments`, does not say.

    Args:
        options: The whole table: what a file may hold, even where this subcommand does not take it.
        left_out: Options (`Option.dest`) that this subcommand does not take: what files say of them is only checked.
        yields: `Option.dest` → variables of another program's that win over what files say of it.
    """
    keys = Keys(options)
    found = config_files.candidates(env, here)
    read, files = _read_files(found, keys)
    profile = _profile(given, read, env)
    values = _Values()
    for tables in (None,) if profile is None else (None, profile):
        for layer, file in read:
            _put_settings(values, keys, file, layer, env, profile=tables)
    _put_environment(values, keys, env, yields or {})
    for option in keys.options():
        if option.dest in given.values:
            source = given.sources[option.dest]
            origin = Origin(layer=Layer.COMMAND_LINE, where=source)
            values.put(option, tuple(given.values[option.dest]), called=source, origin=origin)
    for dest in left_out:
        values.values.pop(dest, None)
        values.sources.pop(dest, None)
    executed = []
    for option in keys.options():
        decided, texts = values.origins.get(option.dest), values.values.get(option.dest)
        if option.executes and texts and decided is not None and decided.layer in FILE_LAYERS:
            shown = "true" if option.metavar is None else " ".join(texts)
            in_profile = f" [profile.{decided.profile}]" if decided.profile else ""
            executed.append(f"{decided.where}{in_profile}: {key_of(option)} = {shown}")
    parsed = replace(given, values=values.values, sources=values.sources, named=values.named, executed=tuple(executed))
    return Resolved(parsed=parsed, origins=values.origins, files=tuple(files), profile=profile)


def arguments(
    given: Mapping[str, object], options: Sequence[Option], *, command: Sequence[str] = (), prefix: str = ""
) -> Parsed:
    """A Python program's keyword arguments as the top layer, to be given to `resolve`.

    `given` has the options' names with ``_`` (None: not given); `prefix` stood before each name, for messages. Raises
    UsageError for an unknown name, with the nearest one, and for a value of another type than the option takes.
    """
    keys = Keys(options)
    values: dict[str, tuple[str, ...]] = {}
    sources: dict[str, str] = {}
    for name, value in given.items():
        option = keys.find(name)
        if option is None:
            from hpc_elastic.options.worker_options import removal

            if (why := removal(name)) is not None:
                raise UsageError(f"{prefix}{name} {why}")
            nearest = keys.nearest(name)
            hint = f"; did you mean {prefix}{nearest.replace('-', '_')}?" if nearest else ""
            raise UsageError(f"unknown parameter {prefix}{name}{hint}")
        if value is None:
            continue
        texts = texts_of(option, value, called=f"{prefix}{name}")
        if texts:
            values[option.dest] = texts
            sources[option.dest] = f"{prefix}{name} ="
    return Parsed(values=values, sources=sources, command=tuple(command))


def configured_runs_dir(env: Mapping[str, str], here: Path) -> str | None:
    """The folder of runs by the layers, for subcommands that take no other option; None: they name none."""
    for name in (f"{VARIABLE_PREFIX}RUNS_DIR", "PET_LOG_DIR"):
        if env.get(name):
            return env[name]
    if not config_files.there(config_files.candidates(env, here)):
        return None  # and the tables of options need not be imported
    from hpc_elastic.options.run_request import ALL_OPTIONS

    nothing = Parsed(values={}, sources={}, command=())
    return resolve(nothing, ALL_OPTIONS, env=env, here=here).parsed.get("runs_dir")


def _read_files(
    found: list[Candidate], keys: Keys
) -> tuple[list[tuple[Layer, SettingsFile]], list[tuple[Candidate, str]]]:
    read: list[tuple[Layer, SettingsFile]] = []
    files: list[tuple[Candidate, str]] = []
    present = config_files.there(found)
    has_project: Path | None = None
    for candidate in found:
        state = "not there"
        if candidate in present and candidate.layer is Layer.PROJECT and has_project is not None:
            state = f"not read, {has_project} comes first"
        elif candidate in present:
            try:
                # Any owner's file that a variable names is obeyed: the user says so. Root trusts root's files only.
                # What others say would be executed in the user's name (``python``, ``health-check``), and in /tmp any
                # user may plant a file above the working directory.
                any_owner = candidate.required and os.geteuid() != 0
                settings = read_settings(candidate.path, keys, tables=candidate.tables, any_owner=any_owner)
                state = "no [tool.hpc-elastic] in it"
            except FileNotFoundError:
                settings = None  # it was removed just now
            except UnsafePathError as error:
                raise UsageError(f"{error}; {config_files.way_out(candidate, error)}") from None
            if settings is not None:
                read.append((candidate.layer, settings))
                state = "read"
                if candidate.layer is Layer.PROJECT:
                    has_project = candidate.path
        files.append((candidate, state))
    return read, files


def _profile(given: Parsed, read: Sequence[tuple[Layer, SettingsFile]], env: Mapping[str, str]) -> str | None:
    asked_by = given.source("profile", "--profile")
    profile = given.get("profile")
    if profile is None and (profile := env.get("HPC_ELASTIC_PROFILE") or None):
        asked_by = "HPC_ELASTIC_PROFILE"
    for _, file in reversed(read):
        if profile is None and file.default_profile is not None:
            profile, asked_by = file.default_profile, f"default-profile in {file.path}"
    names = sorted({name for _, file in read for name in file.profiles})
    if profile is None or profile in names:
        return profile
    from difflib import get_close_matches

    matches = get_close_matches(profile, names, n=1)
    known = f"there are {', '.join(names)}" if names else "no configuration file has one"
    hint = f"did you mean {matches[0]}?" if matches else known
    raise UsageError(f"{asked_by} {profile}: no file has a [profile.{profile}]; {hint}")


def _put_settings(
    values: _Values, keys: Keys, file: SettingsFile, layer: Layer, env: Mapping[str, str], *, profile: str | None
) -> None:
    settings = file.base if profile is None else file.profiles.get(profile, {})
    folder = file.path.parent
    for option in keys.options():
        setting = settings.get(option.dest)
        if setting is None:
            continue
        texts = setting.texts
        if option.path and texts:
            base = folder if layer is Layer.PROJECT else None
            texts = (_expanded(texts[0], env, called=setting.called, base=base, bare=option.dest == "python"),)
        elif option.file_or_command and texts and layer is Layer.PROJECT and (folder / texts[0]).is_file():
            texts = (str(folder / texts[0]),)
        origin = Origin(layer=layer, where=setting.where, profile=profile)
        values.put(option, texts, called=setting.called, origin=origin)


def _put_environment(values: _Values, keys: Keys, env: Mapping[str, str], yields: Mapping[str, Sequence[str]]) -> None:
    known = {variable_of(option): option for option in keys.options() if option.in_files}
    for option in keys.options():
        for name in yields.get(option.dest, ()):
            if name in env:  # even empty: SBATCH_NO_REQUEUE means something by being there
                where = f"{name}, which sbatch reads"
                values.put(option, (), called=name, origin=Origin(layer=Layer.ENVIRONMENT, where=where))
        if option.env and env.get(option.env):
            _put_variable(values, option, option.env, (env[option.env],))
    for name, option in known.items():
        if env.get(name):
            _put_variable(values, option, name, texts_of_variable(option, env[name], called=name))
    for name in env:
        if name.startswith(VARIABLE_PREFIX) and name not in known and name not in NOT_SETTINGS:
            _refuse_if_ours(name.removeprefix(VARIABLE_PREFIX), known)


def _put_variable(values: _Values, option: Option, name: str, texts: tuple[str, ...]) -> None:
    values.put(option, texts, called=name, origin=Origin(layer=Layer.ENVIRONMENT, where=name))


def _refuse_if_ours(name: str, known: Mapping[str, Option]) -> None:
    """A variable that was one of ours, or nearly is one, was meant for us; others may be another program's."""
    from difflib import get_close_matches

    from hpc_elastic.options.worker_options import removal

    variable = VARIABLE_PREFIX + name
    if (why := removal(name)) is not None:
        raise UsageError(f"{variable} {why}; unset the variable")
    if matches := get_close_matches(name, [one.removeprefix(VARIABLE_PREFIX) for one in known], n=1, cutoff=0.75):
        hint = f"did you mean {VARIABLE_PREFIX}{matches[0]}? (unset it if it is not meant for hpc-elastic)"
        raise UsageError(f"unknown variable {variable}; {hint}")


def _expanded(text: str, env: Mapping[str, str], *, called: str, base: Path | None, bare: bool) -> str:
    import re

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not env.get(name):
            raise UsageError(f"{called} {text}: the variable {name} is not set")
        return env[name]

    if text == "~" or text.startswith("~/"):
        if not env.get("HOME"):
            raise UsageError(f"{called} {text}: the variable HOME is not set")
        text = env["HOME"] + text[1:]
    path = re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text)
    if base is None or (bare and "/" not in path):
        return path
    return os.path.normpath(base / path)

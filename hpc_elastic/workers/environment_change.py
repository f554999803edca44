"""The environment that ``--setup`` makes: the shell that makes it, and what it changed. Pure.

The change and not the environment is kept: it holds for whatever else the workers and the processes beside them get.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from hpc_elastic.workers.spawn import find_program
from hpc_elastic.workers.user_command import CommandEnd, describe_end, last_lines, shell_command

_SHELLS_OWN = ("_", "SHLVL", "PWD", "OLDPWD")
_OURS = ("HPC_ELASTIC_", "SLURM_JOB_ID")
_PYTHONS = ("python", "python3")
KEPT_ENVIRONMENT = 8 << 20

_SHELL = r"""
exec 3>&1 1>&2
if [ "$(type -t module)" != function ]; then
  for __file in "${LMOD_PKG:-/}/init/bash" "${MODULESHOME:-/}/init/bash" /etc/profile.d/{lmod,z00_lmod,modules}.sh; do
    if [ -r "$__file" ]; then . "$__file"; break; fi
  done
fi
if [ "$(type -t conda)" != function ] && type -P "${CONDA_EXE:-conda}" >/dev/null; then
  conda() {
    unset -f conda
    eval "$(command "${CONDA_EXE:-conda}" shell.bash hook)" && conda "$@"
  }
fi
unset __file
__setup=$1 __depth=$2 __env=$(type -P env) __done=
set --
trap '__status=$?; trap - ERR; [ -n "$__done" ] || [ $__status -ne 0 ] || "$__env" -0 >&3' EXIT
trap '__status=$? __line=$LINENO; if [ ${#BASH_SOURCE[@]} -le $__depth ]; then
  [ ${#BASH_SOURCE[@]} -gt 0 ] || __line=; printf "\1%s\0%s\0" "$__line" "$BASH_COMMAND" >&3; exit $__status
fi' ERR
eval "$__setup"
__done=1
"$__env" -0 >&3
"""
"""Carries out `$1`. The first command that fails ends it, as under ``set -e``: of those in `$1` and, where `$2` is 1,
in a file that it sources. `module` and `conda activate` work where site and conda are set up for login shells alone.
A file that is sourced without arguments sees those of its caller: it has none (oneAPI's setvars.sh refuses others). The
EXIT trap is for ``exit 0``, and may be replaced."""


class EnvironmentChange(Struct, frozen=True, kw_only=True):
    """What became of the environment."""

    put: Mapping[str, str] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()
    python: str = ""
    """The interpreter that it has put first on PATH; empty: the one that was first still is."""

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv` by that interpreter where it would be by this process' own, which no one has chosen."""
        return [self.python, *argv[1:]] if self.python and argv[0] == sys.executable else list(argv)

    def apply(self, env: Mapping[str, str]) -> dict[str, str]:
        return {**{name: value for name, value in env.items() if name not in self.unset}, **self.put}


NO_CHANGE = EnvironmentChange()


def setup_command(setup: str) -> list[str]:
    """The argument list by which bash carries out ``--setup``; it ends with the environment on stdout."""
    depth = 1 if re.match(r"source (?:'[^']*'|[^\s;&|<>()$`'\"]+)+$", setup) else 0
    return shell_command(_SHELL, setup, str(depth))


def read_change(end: CommandEnd, base: Mapping[str, str]) -> EnvironmentChange | str:
    """What a `setup_command` changed of `base`, which it was started with; or why it has failed."""
    printed = end.stdout.decode("utf-8", "surrogateescape")
    if why := describe_end(end):
        _, failed, where = printed.rpartition("\1")  # on success it may be in a value: PS1 has it around colours
        if failed:
            line, command = where.split("\0")[:2]
            what = "" if command.startswith("eval ") else f" from '{' '.join(command.split())[:200]}'"
            why = f"{why}{what}{f' (line {line})' if line else ''}"
        said = last_lines(end.stderr, 1)
        return f"{why}: {said[0].strip()}" if said else why
    entries = (entry.partition("=") for entry in printed.split("\0") if entry)
    after = {name: value for name, _, value in entries}
    if "PATH" not in after:
        return "it has ended before its environment could be read"
    put = {name: value for name, value in after.items() if base.get(name) != value and not _is_kept(name)}
    change = EnvironmentChange(
        put=put, unset=frozenset(name for name in base if name not in after and not _is_kept(name))
    )
    before, now = (next(filter(None, (find_program(name, env) for name in _PYTHONS)), None) for env in (base, after))
    return EnvironmentChange(put=change.put, unset=change.unset, python=now if now and now != before else "")


def _is_kept(name: str) -> bool:
    return name in _SHELLS_OWN or name.startswith((*_OURS, "__"))

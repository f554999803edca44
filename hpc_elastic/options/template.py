"""``--template FILE``: the user's own batch script, checked; its #SBATCH lines count below the command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from hpc_elastic.errors import UsageError
from hpc_elastic.options import job_options
from hpc_elastic.options.sbatch import NO_HET_JOBS, check_possible, has_components, sbatch_variables
from hpc_elastic.options.table import Option, Parsed

PLACEHOLDERS = {
    "SBATCH_LINES": "the #SBATCH lines of the command line; on a line of its own, after those of the template",
    "COMMAND": "the supervisor's command, quoted for the shell; the script ends by exec of it",
    "RUN_DIR": "the run directory, quoted for the shell",
    "RUN_VARIABLES": "variables of a run; for `unset`, where a worker of another run submitted the script",
    "SHAPE_VARIABLES": "variables that overrule srun's flags; for `unset`, if the script calls srun itself",
}
_PLACEHOLDER = re.compile(r"@([A-Z_]+)@")
_SHELLS = ("sh", "bash", "dash", "ksh", "zsh")
_TRAP = re.compile(r"""trap\s+(?:''|"")\s+(?:\S+\s+)*(?:SIG)?USR2\b""")
_HARMLESS = re.compile(r"(?:set|trap|shopt|umask|:)(?:\s|\Z)")
_ARRAY = re.compile(r"(\w+)=\(\s*@COMMAND@\s*\)")
_SIGNAL = re.compile(r"--signal(?:=|\s+)(\S+)")


def check_template(text: str) -> list[str]:
    """The faults of a template, each in a few words; none, where a run can be submitted with it."""
    lines = text.splitlines()
    problems = []
    shell = _shell(lines[0] if lines else "")
    if shell is None:
        problems.append("line 1 must name the shell, as in #!/bin/bash")
    elif shell not in _SHELLS:
        problems.append(f"line 1 names {shell}; the script must be for bash or sh")
    if "\r" in text:
        problems.append("it has DOS line ends, which sbatch refuses; run dos2unix on it")
    known = ", ".join(f"@{name}@" for name in PLACEHOLDERS)
    for name in dict.fromkeys(_PLACEHOLDER.findall(text)):
        if name not in PLACEHOLDERS:
            problems.append(f"@{name}@ is not a known placeholder; there are {known}")
    return problems + _problems_of_lines(lines) + _problems_of_options(lines)


def _shell(line: str) -> str | None:
    """``#!/usr/bin/env bash`` → ``bash``."""
    if not line.startswith("#!"):
        return None
    names = [word.rpartition("/")[2] for word in line[2:].split() if not word.startswith("-")]
    return next((name for name in names if name != "env"), None)


def _problems_of_lines(lines: Sequence[str]) -> list[str]:
    problems = []
    commands = [number for number, line in enumerate(lines, 1) if _is_command(line)]
    own = [number for number, line in enumerate(lines, 1) if line.startswith("#SBATCH")]
    placed = [number for number, line in enumerate(lines, 1) if line.strip() == "@SBATCH_LINES@"]
    begin = commands[0] if commands else len(lines) + 1
    if not placed:
        problems.append("a line @SBATCH_LINES@ is missing: nothing of the command line would reach sbatch")
    elif placed[0] > begin:
        problems.append(f"@SBATCH_LINES@ must stand before line {begin}, the first command: sbatch reads no further")
    late = [number for number in own if number > begin]
    if late:
        problems.append(f"line {late[0]}: sbatch reads no #SBATCH line after the first command, on line {begin}")
    elif placed and own and own[-1] > placed[0]:
        problems.append(
            f"@SBATCH_LINES@ must stand after the template's own #SBATCH lines (line {own[-1]}), so that the command "
            "line wins"
        )
    traps = [number for number in commands if _TRAP.match(lines[number - 1].strip())]
    if not traps:
        problems.append(
            "trap '' USR2 is missing: the notice before the time limit would end the shell, and the job with it"
        )
    else:
        before = [n for n in commands if n < traps[0] and not _HARMLESS.match(lines[n - 1].strip())]
        if before:
            problems.append(f"trap '' USR2 must stand before line {before[0]}: a notice during that would end the job")
    problems += _problems_of_exec(lines)
    return problems


def _problems_of_exec(lines: Sequence[str]) -> list[str]:
    text = "\n".join(line for line in lines if _is_command(line))
    if "@COMMAND@" not in text:
        return ["@COMMAND@ is missing: the script would start no supervisor"]
    arrays = _ARRAY.findall(text)
    meant = ["@COMMAND@", *(f'"${{{name}[@]}}"' for name in arrays)]
    for line in text.splitlines():
        for part in re.split(r"&&|\|\||;", line):
            if part.strip().startswith("exec ") and any(word in part for word in meant):
                return []
    return ["the supervisor must be started with exec (exec @COMMAND@): signals go to the script's own process alone"]


def _problems_of_options(lines: Sequence[str]) -> list[str]:
    problems = []
    for number, line in enumerate(lines, 1):
        if not line.startswith("#SBATCH"):
            continue
        try:
            words = sbatch_words([line])
        except ValueError as error:
            problems.append(f"line {number}: {str(error).lower()}")
            continue
        if has_components(words):
            problems.append(f"line {number}: {NO_HET_JOBS}")
            continue
        for word in words:
            try:
                if word.startswith("-"):
                    check_possible(word, option=f"line {number}:")
            except UsageError as error:
                problems.append(str(error))
        signal = _SIGNAL.search(" ".join(words))
        if signal and not re.match(r"B:(?:SIG)?USR2(?:@|\Z)", signal.group(1)):
            problems.append(
                f"line {number}: --signal={signal.group(1)}: the supervisor must get USR2, as in --signal=B:USR2@120"
            )
    return problems


def sbatch_words(lines: Sequence[str]) -> list[str]:
    """The words that the ``#SBATCH`` lines among `lines` give sbatch; raises ValueError for quotes without end."""
    words: list[str] = []
    for line in lines:
        if line.startswith("#SBATCH"):
            words += shlex.split(line.removeprefix("#SBATCH"), comments=True)
    return words


def _is_command(line: str) -> bool:
    text = line.strip()
    return bool(text) and not text.startswith("#") and text != "@SBATCH_LINES@"


def read_template(parsed: Parsed, cwd: Path, env: Mapping[str, str]) -> tuple[str | None, Parsed]:
    """The template's text (None without ``--template``), and the command line with what its #SBATCH lines add.

    As for sbatch, an option of the command line wins over a SBATCH_* variable, and that over a line of the script. A
    line of the script wins over a configuration file. Raises UsageError with every reason why a run can't work with it.
    """
    given = parsed.get("template")
    if given is None:
        return None, parsed
    try:
        text = (cwd / given).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"--template {given}: not UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"--template {given} can't be read: {error.strerror}") from None
    problems = check_template(text)
    if problems:
        raise UsageError(f"--template {given}: {'; '.join(problems)}")
    values, sources = dict(parsed.values), dict(parsed.sources)
    for dest, (name, value) in asked_by(sbatch_words(text.splitlines())).items():
        # A configuration file, which is neither, stands below the script.
        is_given = parsed.source(dest, "").startswith(("-", "HPC_ELASTIC_", "PET_"))
        if not is_given and not any(variable in env for variable in sbatch_variables(dest)):
            values[dest] = (value,)
            sources[dest] = f"{given}: {name}"
    return text, replace(parsed, values=values, sources=sources)


def asked_by(words: Sequence[str]) -> dict[str, tuple[str, str]]:
    """`Option.dest` → name and value of what sbatch is asked for; unknown options stay in the script."""
    by_name: dict[str, Option] = {
        name: option for option in job_options.OPTIONS if option.sbatch for name in option.names
    }
    found: dict[str, tuple[str, str]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--") and len(word) > 2:
            name, equals, value = word[:2], "=", word[2:].removeprefix("=")
        option = by_name.get(name)
        if option is None:
            continue
        if option.metavar is None:
            value = option.constant
        elif not equals and not option.optional_value:
            value = rest.pop(0) if rest else ""
        if value or option.optional_value:
            found[option.dest] = (name, value)
    return found

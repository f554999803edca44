"""``--template FILE``: the user's own batch script, checked; its #SBATCH lines count below the command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from hpc_elastic.errors import UsageError
from hpc_elastic.options import job_options
from hpc_elastic.options.sbatch import NO_HET_JOBS, check_possible, has_components, sbatch_variables, split_option
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
    return list(_problems(text))


def _problems(text: str) -> Iterator[str]:
    lines = text.splitlines()
    shell = _shell(lines[0] if lines else "")
    if shell is None:
        yield "line 1 must name the shell, as in #!/bin/bash"
    elif shell not in _SHELLS:
        yield f"line 1 names {shell}; the script must be for bash or sh"
    if "\r" in text:
        yield "it has DOS line ends, which sbatch refuses; run dos2unix on it"
    known = ", ".join(f"@{name}@" for name in PLACEHOLDERS)
    for name in dict.fromkeys(_PLACEHOLDER.findall(text)):
        if name not in PLACEHOLDERS:
            yield f"@{name}@ is not a known placeholder; there are {known}"
    yield from _problems_of_lines(lines)
    yield from _problems_of_options(lines)


def _shell(line: str) -> str | None:
    if not line.startswith("#!"):
        return None
    names = [word.rpartition("/")[2] for word in line[2:].split() if not word.startswith("-")]
    return next((name for name in names if name != "env"), None)


def _problems_of_lines(lines: Sequence[str]) -> Iterator[str]:
    commands = [number for number, line in enumerate(lines, 1) if _is_command(line)]
    own = [number for number, line in enumerate(lines, 1) if line.startswith("#SBATCH")]
    placed = [number for number, line in enumerate(lines, 1) if line.strip() == "@SBATCH_LINES@"]
    begin = commands[0] if commands else len(lines) + 1
    if not placed:
        yield "a line @SBATCH_LINES@ is missing: nothing of the command line would reach sbatch"
    elif placed[0] > begin:
        yield f"@SBATCH_LINES@ must stand before line {begin}, the first command: sbatch reads no further"
    late = [number for number in own if number > begin]
    if late:
        yield f"line {late[0]}: sbatch reads no #SBATCH line after the first command, on line {begin}"
    elif placed and own and own[-1] > placed[0]:
        yield (
            f"@SBATCH_LINES@ must stand after the template's own #SBATCH lines (line {own[-1]}), so that the command "
            "line wins"
        )
    traps = [number for number in commands if _TRAP.match(lines[number - 1].strip())]
    if not traps:
        yield ("trap '' USR2 is missing: the notice before the time limit would end the shell, and the job with it")
    else:
        before = [n for n in commands if n < traps[0] and not _HARMLESS.match(lines[n - 1].strip())]
        if before:
            yield f"trap '' USR2 must stand before line {before[0]}: a notice during that would end the job"
    text = "\n".join(lines[number - 1] for number in commands)
    meant = ["@COMMAND@", *(f'"${{{name}[@]}}"' for name in _ARRAY.findall(text))]
    starts = [part for part in re.split(r"&&|\|\||;|\n", text) if part.strip().startswith("exec ")]
    if "@COMMAND@" not in text:
        yield "@COMMAND@ is missing: the script would start no supervisor"
    elif not any(word in part for part in starts for word in meant):
        yield "the supervisor must be started with exec (exec @COMMAND@): signals go to the script's own process alone"


def _problems_of_options(lines: Sequence[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.startswith("#SBATCH"):
            continue
        try:
            words = sbatch_words([line])
        except ValueError as error:
            yield f"line {number}: {str(error).lower()}"
            continue
        if has_components(words):
            yield f"line {number}: {NO_HET_JOBS}"
            continue
        for word in words:
            try:
                if word.startswith("-"):
                    check_possible(word, option=f"line {number}:")
            except UsageError as error:
                yield str(error)
        signal = _SIGNAL.search(" ".join(words))
        if signal and not re.match(r"B:(?:SIG)?USR2(?:@|\Z)", signal.group(1)):
            yield (
                f"line {number}: --signal={signal.group(1)}: the supervisor must get USR2, as in --signal=B:USR2@120"
            )


def sbatch_words(lines: Sequence[str]) -> list[str]:
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
        name, equals, value = split_option(rest.pop(0))
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

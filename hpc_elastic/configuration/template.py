"""``--template FILE``: the user's own batch script, whose #SBATCH lines count where the command line says nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_elastic.configuration import job_options
from hpc_elastic.configuration.option_table import Option, Parsed
from hpc_elastic.errors import UsageError
from hpc_elastic.slurm.sbatch import sbatch_variables
from hpc_elastic.slurm.template import check_template, sbatch_words


def read_template(parsed: Parsed, cwd: Path, env: Mapping[str, str]) -> tuple[str | None, Parsed]:
    """The template's text, and the command line with what its #SBATCH lines ask for besides.

    As for sbatch, an option of the command line wins over a SBATCH_* variable, and that over a line of the script. A
    line of the script wins over a configuration file.

    Args:
        parsed: The command line.
        cwd: Where a relative path begins.
        env: For sbatch's variables.

    Returns:
        None and `parsed`, where there is no ``--template``.

    Raises:
        UsageError: it can't be read, or a run can't work with it: every reason in one message.
    """
    given = parsed.get("template")
    if given is None:
        return None, parsed
    try:
        text = (cwd / given).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"--template {given}: no text in UTF-8") from None
    except OSError as error:
        raise UsageError(f"--template {given} can't be read: {error.strerror}") from None
    problems = check_template(text)
    if problems:
        raise UsageError(f"--template {given}: {'; '.join(problems)}")
    values, sources = dict(parsed.values), dict(parsed.sources)
    for dest, (name, value) in asked_by(sbatch_words(text.splitlines())).items():
        if not _is_given(parsed, dest) and not any(variable in env for variable in sbatch_variables(dest)):
            values[dest] = (value,)
            sources[dest] = f"{given}: {name}"
    return text, replace(parsed, values=values, sources=sources)


def _is_given(parsed: Parsed, dest: str) -> bool:
    """By the command line or a variable; what a configuration file says is less than what this script does."""
    return parsed.from_command_line(dest) or parsed.source(dest, "").startswith(("HPC_ELASTIC_", "PET_"))


def asked_by(words: Sequence[str]) -> dict[str, tuple[str, str]]:
    """By `Option.dest`, the name and the value of what sbatch is asked for; what this program does not know is left
    out, and stays in the script."""
    by_name: dict[str, Option] = {name: option for option in job_options.sbatchs_own() for name in option.names}
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

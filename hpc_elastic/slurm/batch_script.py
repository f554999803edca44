"""Options → the text of the batch script. Pure: nothing reaches a shell unquoted, and nothing is run."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from hpc_elastic.errors import UsageError
from hpc_elastic.options.sbatch import SbatchOptions, ScriptLines, sbatch_arguments, sbatch_line
from hpc_elastic.slurm.commands import SHAPE_VARIABLES
from hpc_elastic.slurm.job_environment import RUN_VARIABLES, WORKER_VARIABLES

_PLACEHOLDER = re.compile(r"@([A-Z_]+)@")
_RUN = 'exec "${supervisor[@]}"\n'
_WITH_END = """\
# Slurm's signals are for the supervisor, and this shell stays for what comes after it.
run_pid='' run_early='' run_code=0
run_relay() { if [[ -n $run_pid ]]; then kill "-$1" "$run_pid"; else run_early+=" -$1"; fi; }
trap 'run_relay USR2' USR2
trap 'run_relay TERM' TERM
(
  trap '' USR2
  exec "${supervisor[@]}"
) &
run_pid=$!
for run_signal in $run_early; do kill "$run_signal" "$run_pid"; done
# Not by wait: a signal that comes just before it is heard when the run has ended. This read has never anything to read.
exec {run_tick}<> <(:)
while kill -0 "$run_pid" 2>/dev/null; do read -r -t 0.2 -u "$run_tick" || :; done
trap '' USR2 TERM
wait "$run_pid" && run_code=0 || run_code=$?
"""


def render_script(
    options: SbatchOptions,
    *,
    run_dir: str,
    command: Sequence[str],
    template: str | None = None,
    lines: ScriptLines | None = None,
) -> str:
    """Render the batch script, which becomes `command`, an absolute interpreter first.

    Without `output` both streams go to job.log in the run directory, or in each task's.

    Raises:
        UsageError: a value that can't be given to sbatch, with its option's name; lines for which a template of the
            user's has no place.
    """
    arguments = sbatch_arguments(options)
    if options.output is None:
        if options.array and "\\" in run_dir:
            raise UsageError(f"--array: sbatch can't number the logs in {run_dir}, for its backslash; give --output")
        log = literal_path(run_dir) + ("/task-%a/job.log" if options.array else "/job.log")
        arguments.append(f"--output={log}")
    values = {
        "SBATCH_LINES": "\n".join(map(sbatch_line, arguments)),
        "SHAPE_VARIABLES": _names(SHAPE_VARIABLES),
        "RUN_VARIABLES": _names((*RUN_VARIABLES, *WORKER_VARIABLES)),
        "RUN_DIR": _literal(run_dir),
        "COMMAND": " ".join(map(_literal, command)),
    }
    script = _PLACEHOLDER.sub(lambda match: values[match.group(1)], template or load_template())
    return _with_lines(script, lines) if lines else script


def _names(variables: Sequence[str]) -> str:
    return " \\\n  ".join(textwrap.wrap(" ".join(variables), 112))


def literal_path(path: str) -> str:
    """``%%`` is a percent sign; but where a path has a backslash, only backslashes quote (tried on 22.05)."""
    return path.replace("\\", "\\\\") if "\\" in path else path.replace("%", "%%")


def load_template() -> str:
    package = Path(__file__).resolve().parents[1]
    for folder in (package, package.parent):
        path = folder / "sbatch_templates" / "elastic.sbatch"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise FileNotFoundError(
        f"sbatch_templates/elastic.sbatch is neither in {package} nor beside it: reinstall hpc_elastic"
    )


def _with_lines(script: str, lines: ScriptLines) -> str:
    before, run, after = script.rpartition(_RUN)
    if not run or after.strip():
        raise UsageError("setup and teardown have no place in this template: write them into it")
    if lines.setup:
        before += "".join(f"{line}\n" for line in ("# setup", *lines.setup, ""))
    if not lines.teardown:
        return before + run
    return before + _WITH_END + "".join(f"{line}\n" for line in ("", "# teardown", *lines.teardown, 'exit "$run_code"'))


def _literal(word: str) -> str:
    """Quote for bash. Always: in an array a bare ``a,b`` or ``a=b`` looks like a mistake to shellcheck."""
    return "'" + word.replace("'", "'\\''") + "'"

"""The batch script with the user's own shell commands before and after the run. Pure."""

from __future__ import annotations

from hpc_elastic.errors import UsageError
from hpc_elastic.submission.parameters import ScriptLines

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
while kill -0 "$run_pid" 2>/dev/null; do
  wait "$run_pid" && run_code=0 || run_code=$?
done
trap '' USR2 TERM
wait "$run_pid" && run_code=0 || run_code=$?
"""


def with_lines(script: str, lines: ScriptLines) -> str:
    """A rendered script with them in it, as they are: they are the user's.

    Raises:
        UsageError: it comes from another template than this package's.
    """
    if not (lines.setup or lines.teardown):
        return script
    before, run, after = script.rpartition(_RUN)
    if not run or after.strip():
        raise UsageError("setup and teardown have no place in this template: write them into it")
    if lines.setup:
        before += "".join(f"{line}\n" for line in ("# setup", *lines.setup, ""))
    if not lines.teardown:
        return before + run
    return before + _WITH_END + "".join(f"{line}\n" for line in ("", "# teardown", *lines.teardown, 'exit "$run_code"'))

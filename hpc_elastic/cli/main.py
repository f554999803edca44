"""``hpc-elastic SUBCOMMAND``: imports that subcommand's module alone, and turns what goes wrong into an exit code.

What subcommands print by is here too: colours, width, notes on stderr, and standard output that can't be written.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn, TextIO

from hpc_elastic import __version__
from hpc_elastic.errors import HpcElasticError, UsageError

PROGRAM = "hpc-elastic"
COMPLETE_VARIABLE = f"_{PROGRAM}_complete".replace("-", "_").upper()
_USAGE, _INTERRUPTED, _BROKEN_PIPE = 2, 130, 141

# Name → module, help. A module has `main(argv)`, or PARAMETERS and `run(args)`: see `of_subcommand`.
_SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "submit": ("submit", "create a run directory and submit the run to Slurm (or run it here: --cluster local)"),
    "run": ("run", "run in the foreground, in this Slurm allocation or on this machine"),
    "report": ("report", "show what failed first, and why"),
    "logs": ("logs", "show the output of all workers, or with --events what was done and decided, and why"),
    "status": ("status", "show the state of a run: nodes, steps, restarts, what Slurm says"),
    "hangs": ("report", "find the rank that the others wait for, from dumps of torch's flight recorder"),
    "list": ("list_runs", "list runs with their states"),
    "doctor": ("preflight", "check whether this cluster, account and installation let a run work, and what to do"),
    "rehearse": ("preflight", "run a script with planted faults, and judge whether it really resumes"),
    "convert": ("submit", "convert an sbatch file that starts torchrun into a command, and explain each line"),
    "clean": ("list_runs", "remove directories of old runs, never of one that may be running"),
    "cancel": ("run_job", "cancel a run's job: its workers get SIGTERM, and the report is written"),
    "requeue": ("run_job", "have a run save and begin its next attempt; or requeue a Slurm job that has ended"),
    "config": ("config", "show the value of each option, and where it comes from"),
    "completion": ("config", "print a script for bash, zsh or fish that completes subcommands, options and runs"),
    "agent": ("run", "run the agent of one node, inside a step of your own"),
}
_REMOVED: dict[str, str] = {
    "chaos": "use hpc-elastic rehearse, which does faults to runs of its own",
    "events": "hpc-elastic logs RUN --events shows what was done and decided, and why",
    "why": "use hpc-elastic report RUN",
    "what-if": "hpc-elastic report RUN shows what failures cost, and advises an interval between checkpoints",
    "list --bad-nodes": "hpc-elastic status RUN shows what a run has against nodes; no memory goes beyond the run",
    "list --forget-nodes": "use hpc-elastic status RUN --forget-nodes NODES",
}
"""Subcommands of earlier versions, and their options → what to use in their place."""
_AGENT_OPTIONS = ("--run-dir", "--attempt", "--node", "--launcher-pid")
"""A launcher of ours calls ``agent`` with one of these first, a user's srun does not."""


def console_main() -> NoReturn:
    """The command itself. `hpc_elastic.cli` lets Ctrl-C end the process until `_end_imports`."""
    try:
        gc.disable()  # until all is imported, of which nothing is garbage: a tenth of an agent's start
        if COMPLETE_VARIABLE in os.environ:
            from hpc_elastic.cli.config import answer_shell

            answer_shell()
        code = main(sys.argv[1:])
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # else Python's own end prints a traceback
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def main(argv: Sequence[str]) -> int:
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a path that is no UTF-8 must not end in a traceback
    try:
        code = _dispatch(list(argv))
        sys.stdout.flush()
        return code
    except UsageError as error:
        return _print_error(error, _USAGE)
    except HpcElasticError as error:
        return _print_error(error, 1)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        leave_output()  # its reader has gone (`| head`)
        return _BROKEN_PIPE
    except OSError as error:
        # A file or folder of the user's that can't be reached is no defect of ours; anything else shows its traceback.
        if error.filename is None and (gone := _why_nowhere(error)) is not None:
            return _print_error(UsageError(gone), _USAGE)
        if error.filename is None:
            if not output_failed(error):
                raise
            leave_output()
            return _print_error(HpcElasticError(message=f"standard output can't be written: {error.strerror}"), 1)
        return _print_error(UsageError(f"{error.filename}: {error.strerror}"), _USAGE)


def _dispatch(argv: list[str]) -> int:
    if not argv:
        sys.stderr.write(_help())
        return _USAGE
    name, rest = argv[0], argv[1:]
    if name in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return 0
    if name in ("-V", "--version"):
        sys.stdout.write(f"{PROGRAM} {__version__}\n")
        return 0
    if name == "agent" and rest and rest[0].partition("=")[0] in _AGENT_OPTIONS:
        _import_msgspec()
        from hpc_elastic.agent.main import agent_main

        _end_imports()
        return agent_main(rest)
    for called in (name, *(f"{name} {word.partition('=')[0]}" for word in rest)):
        if called in _REMOVED:
            raise UsageError(f"{PROGRAM} {called} was removed: {_REMOVED[called]}")
    if name in _SUBCOMMANDS:
        return _run(_SUBCOMMANDS[name][0], name, rest)
    if name == "batch":
        return _batch(rest)
    from difflib import get_close_matches

    hint = f"; to run a script: {PROGRAM} submit {name}" if name.endswith(".py") else ""
    if matches := get_close_matches(name, _SUBCOMMANDS, n=1):
        hint = f"; did you mean {matches[0]}?"
    raise UsageError(f"no subcommand {name!r}{hint}; {PROGRAM} --help lists them")


def _run(module_name: str, name: str, argv: list[str]) -> int:
    from importlib import import_module

    _import_msgspec()
    module = import_module(f"hpc_elastic.cli.{module_name}")
    _end_imports()
    if main_of := of_subcommand(module, "main", name):
        return int(main_of(argv))
    from hpc_elastic.options.table import read_arguments

    parameters, note = (of_subcommand(module, what, name) for what in ("PARAMETERS", "NOTE"))
    args = read_arguments(f"{PROGRAM} {name}", _SUBCOMMANDS[name][1], parameters, argv, note=note or "")
    return 0 if args is None else int(of_subcommand(module, "run", name)(args))


def _import_msgspec() -> None:
    """Import it without typing_extensions, which it takes where it is there, and which brings inspect and ast along: a
    twentieth of an agent's start (0.22). What a script needs of it is not touched: this is a process of our own."""
    if "typing_extensions" in sys.modules:
        return
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    try:
        import msgspec  # noqa: F401
    finally:
        del sys.modules["typing_extensions"]


def _end_imports() -> None:
    """The garbage collector never looks at what they have made; Ctrl-C is an exception from now on. In an import Python
    may print it, and go on."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def of_subcommand(module: ModuleType, what: str, name: str) -> Any:
    """A subcommand's own ``run_NAME`` or ``NAME_PARAMETERS`` in a module, else ``run`` or ``PARAMETERS``; else None."""
    own = f"{what}_{name}" if what.islower() else f"{name.upper()}_{what}"
    return getattr(module, own, None) or getattr(module, what, None)


def _batch(argv: list[str]) -> int:
    """``batch [--finish ATTEMPT AGENT] RUN_DIR``, not for people: the batch script becomes it."""
    from pathlib import Path

    from hpc_elastic.launch import batch
    from hpc_elastic.slurm.job_environment import without_run_variables

    _end_imports()
    if len(argv) == 4 and argv[0] in ("--finish", "--finish-unconfirmed") and argv[1].isdecimal():
        confirmed = argv[0] == "--finish"
        return batch.finish_attempt(Path(argv[3]), int(argv[1]), os.environ, agent=argv[2], confirmed=confirmed)
    if len(argv) == 2 and argv[0] == "--job-nodes":
        return batch.print_job_nodes(Path(argv[1]), os.environ)
    if len(argv) != 1 or argv[0].startswith("-"):
        raise UsageError("batch takes one run directory; it is called by the script that submit makes")
    # A worker of another run may have submitted this job by hand.
    env = without_run_variables(os.environ)
    return batch.run_batch(batch.run_of_this_job(Path(argv[0]), env), env)


def _open_missing_streams() -> None:
    """The next file to be opened would be taken for a standard stream that was closed (``>&-``)."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _why_nowhere(error: OSError) -> str | None:
    """The way out where `error` is that this process's directory was deleted or unmounted; else None."""
    try:
        os.getcwd()
    except OSError as problem:
        if problem.errno == error.errno:
            where = os.environ.get("PWD") or "of this shell"
            return f"the current directory {where} no longer exists ({problem.strerror}); change to another directory"
    return None


def _print_error(error: HpcElasticError, code: int) -> int:
    print_note(f"error: {' '.join(str(error).splitlines())}")
    return code


def _help() -> str:
    width = max(map(len, _SUBCOMMANDS)) + 2
    lines = [f"  {name:<{width}}{text}" for name, (_, text) in _SUBCOMMANDS.items()]
    return (
        f"usage: {PROGRAM} SUBCOMMAND ...\n\n"
        "Fault-tolerant, elastic PyTorch training on Slurm.\n\n" + "\n".join(lines) + "\n\n"
        f"{PROGRAM} SUBCOMMAND --help shows its options. {PROGRAM} --version prints the version.\n"
    )


BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"


def wants_colour(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Colours on a terminal alone: NO_COLOR forbids them, FORCE_COLOR asks for them anywhere, TERM=dumb has none."""
    if env.get("NO_COLOR"):
        return False
    if env.get("FORCE_COLOR"):
        return env["FORCE_COLOR"] != "0"
    return env.get("TERM") != "dumb" and is_terminal(stream)


def is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:
        return False  # it is closed


def width_for(stream: TextIO) -> int:
    from shutil import get_terminal_size

    return get_terminal_size().columns if is_terminal(stream) else 120


def painted(text: str, colour: str) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if colour else text


def print_note(text: str) -> None:
    """One line, whatever it quotes; never a second failure over a closed stderr."""
    from hpc_elastic.output.terminal import one_line

    with suppress(OSError):
        sys.stderr.write(f"{PROGRAM}: {one_line(text)}\n")
        sys.stderr.flush()


def output_failed(error: OSError) -> bool:
    """Tell a failed write to standard output: the error names no file."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return error.filename is None and (isinstance(error, BrokenPipeError) or is_full)


def leave_output() -> None:
    """Discard what could not be written; else Python would complain once more at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

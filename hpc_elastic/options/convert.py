"""An sbatch file that starts torchrun → the command of this program that does the same, and what became of each line.

Pure: text in, `Conversion` out. A line is taken over as options, kept (it stands before the command, in the shell that
submits: the job gets its environment from there), dropped with the reason, or left, where the user has to decide. What
makes the environment becomes ``--setup``, but where the command itself needs it.
Nothing is guessed: what is not known here is left.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from msgspec import Struct

from hpc_elastic.errors import UsageError
from hpc_elastic.options import job_options
from hpc_elastic.options.launch_line import ASSIGNMENT, OF_THE_JOB, PRINTS, Launch, find_launch, plain
from hpc_elastic.options.sbatch import IMPOSSIBLE, NO_HET_JOBS, has_components, parse_nodes
from hpc_elastic.options.table import Option


class Fate(str, Enum):
    """What became of a line."""

    KEPT = "kept"
    TAKEN = "taken over"
    DROPPED = "dropped"
    LEFT = "not taken over"


class ConvertedLine(Struct, frozen=True, kw_only=True):
    number: int
    """From 1."""
    text: str
    fate: Fate
    why: str
    """What it became, or the reason."""


class Conversion(Struct, frozen=True, kw_only=True):
    """What `convert` found."""

    before: tuple[str, ...]
    """Shell lines for the shell that submits."""
    words: tuple[str, ...]
    """Of the command, as a shell reads them: quoted where that is needed, with the file's own variables."""
    lines: tuple[ConvertedLine, ...]

    @property
    def command(self) -> str:
        return " ".join(self.words)

    @property
    def left(self) -> tuple[ConvertedLine, ...]:
        return tuple(line for line in self.lines if line.fate is Fate.LEFT)


_WORD = re.compile(
    r"""(?:[^\s'"\\;&|<>()`$]|\\.|'[^']*'|"(?:[^"\\]|\\.)*"|`[^`]*`|\$\((?:[^()]|\([^()]*\))*\)|\$\{[^}]*\}|\$)+""",
    re.DOTALL,
)
_MEETING = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "NNODES", "RDZV_HOST")
_CONTROL = (
    "if",
    "then",
    "else",
    "elif",
    "fi",
    "for",
    "while",
    "until",
    "do",
    "done",
    "case",
    "esac",
    "function",
    "{",
    "}",
)
_ENVIRONMENT = (
    "module",
    "ml",
    "source",
    ".",
    "conda",
    "mamba",
    "micromamba",
    "spack",
    "export",
    "unset",
)
_OF_THE_SHELL = ("ulimit", "cd")
_SHELL = ("set", "shopt", "umask", "eval", "true", ":", "wait", "exit")
_FOR_MEETING = re.compile(r"scontrol|\bhostname\b|NODELIST|LAUNCH_NODE_IPADDR|/dev/tcp|getent|\bip addr\b")
_IN_SETUP = "--setup: bash does it on each node before the workers start"
_IN_THE_SHELL = "in the shell that submits; the job gets its environment"
_MEET = "nodes meet through files in the run directory, and workers get MASTER_ADDR and MASTER_PORT"


def convert(text: str) -> Conversion:
    """Find what an sbatch file asks for.

    Args:
        text: The file.

    Raises:
        UsageError: there is no line that starts workers, or more than one; or what it starts is not understood.
    """
    reader = _Reader()
    for number, line in _logical_lines(text):
        reader.take(number, line)
    return reader.finish()


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Lines with those that they are continued on by a backslash, with the number of the first."""
    found: list[tuple[int, str]] = []
    pending, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        first = first if pending else number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            pending += line[:-1].rstrip() + " "
            continue
        found.append((first, (pending + line.strip()).strip()))
        pending = ""
    return [*found, (first, pending.strip())] if pending.strip() else found


def _words(line: str) -> list[str] | None:
    """The words of a simple command, raw, without a comment behind it; None: it is more than that."""
    words, at = [], 0
    while at < len(line):
        if line[at].isspace():
            at += 1
        elif line[at] == "#":
            break
        elif match := _WORD.match(line, at):
            words.append(match[0])
            at = match.end()
        else:
            return None
    return words


class _SetupLine(Struct, frozen=True, kw_only=True):
    """A line that makes the environment."""

    number: int
    line: str
    text: str
    """Without a comment."""
    name: str = ""
    """The variable that it sets; empty: not known, or none."""


class _Reader:
    def __init__(self) -> None:
        self._options: list[tuple[str, str]] = []  # of the job: name, raw value (empty: a flag)
        self._before: list[tuple[int, str]] = []
        self._setup: list[_SetupLine] = []
        self._lines: list[ConvertedLine] = []
        self._job_only: set[str] = set(_MEETING)
        """Variables that exist in the job alone."""
        self._launch: Launch | None = None
        self._tasks: dict[str, str] = {}
        self._launch_line = 0
        self._depth = 0

    def take(self, number: int, line: str) -> None:
        """One logical line."""
        if line.startswith("#SBATCH"):
            self._directive(number, line)
        elif line.startswith("#!"):
            self._note(number, line, Fate.DROPPED, "the batch script is written for you")
        elif line and not line.startswith("#"):
            self._command(number, line)

    def _note(self, number: int, line: str, fate: Fate, why: str) -> None:
        self._lines.append(ConvertedLine(number=number, text=line, fate=fate, why=why))

    def _directive(self, number: int, line: str) -> None:
        try:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError as error:
            self._note(number, line, Fate.LEFT, str(error).lower())
            return
        if has_components(words):
            raise UsageError(f"line {number}: {NO_HET_JOBS}")
        while words:
            word = words.pop(0)
            name, equals, value = word.partition("=")
            if not word.startswith("--") and len(word) > 2:
                name, equals, value = word[:2], "=", word[2:].removeprefix("=")
            if not word.startswith("-"):
                self._note(number, line, Fate.LEFT, f"{word} is not an option")
                continue
            option = _OF_SLURM.get(name)
            if not equals and words and not words[0].startswith("-") and (option is None or option.metavar is not None):
                value = words.pop(0)
            fate, why = self._asked(name, value, option)
            self._note(number, line, fate, why)

    def _asked(self, name: str, value: str, option: Option | None) -> tuple[Fate, str]:
        long = _LONG.get(name, name)
        if long in ("--ntasks-per-node", "--ntasks", "--tasks-per-node", "--gpus-per-task"):
            self._tasks["--ntasks-per-node" if long == "--tasks-per-node" else long] = value
            return Fate.TAKEN, "one agent is started on each node; it starts the workers"
        if long == "--open-mode":
            return Fate.DROPPED, "every attempt appends to the job log"
        if long == "--signal":
            match = re.search(r"@(\d+)", value)
            self._options += [("--grace", match[1])] if match else []
            return (
                Fate.TAKEN,
                f"{f'--grace {match[1]}; ' if match else ''}the notice before the time limit is always asked for",
            )
        if long in IMPOSSIBLE and option is None:
            return Fate.LEFT, IMPOSSIBLE[long]
        if name.startswith("--no-kill") or name == "-k":
            return Fate.DROPPED, "--no-kill is always given, so that a run survives the loss of nodes"
        if option is None:
            argument = f"{name}={value}" if value and name.startswith("--") else f"{name}{value}"
            self._options.append(("--sbatch-arg", shlex.quote(argument)))
            return Fate.TAKEN, f"--sbatch-arg={argument}"
        shown = next(one for one in option.names if one.startswith("--") and (one == name or not name.startswith("--")))
        if (
            shown == "--export"
            and value
            and not {"ALL", "NONE", "NIL"} & {part.partition("=")[0] for part in value.split(",")}
        ):
            self._options.append((shown, shlex.quote(f"ALL,{value}")))
            return (
                Fate.TAKEN,
                f"--export ALL,{value}: without ALL the job would not have the environment of the lines before",
            )
        self._options.append((shown, shlex.quote(value) if value else ""))
        return Fate.TAKEN, f"{shown} {value}".strip()

    def _command(self, number: int, line: str) -> None:
        words = _words(line)
        first = plain(words[0]) if words else line.split()[0]
        if first in _CONTROL or self._depth:
            self._depth += (first in ("if", "for", "while", "until", "case", "{")) - (
                first in ("fi", "done", "esac", "}")
            )
            self._note(number, line, Fate.LEFT, "control flow: what it does depends on the job")
            return
        is_array = re.fullmatch(r"\w+=\(.*\)", line) is not None
        assigned = ASSIGNMENT.fullmatch(line) if is_array or (words and len(words) <= 2) else None
        if assigned:
            self._assignment(number, line, assigned[1], assigned[2])
            if words and first == "export" and self._before[-1:] == [(number, line)]:
                self._before.pop()  # where it goes is known when the command is
                self._lines.pop()
                text = " ".join(words)
                self._setup.append(_SetupLine(number=number, line=line, text=text, name=assigned[1]))
            return
        if words is None:
            if any(launcher in line for launcher in ("torchrun", "torch.distributed", "accelerate launch", "srun ")):
                raise UsageError(
                    f"line {number}: the workers are started by more than a simple command ({line[:60]}); write that "
                    "line as one command without pipes, && and redirections (the job log has the output)"
                )
            is_print = first in PRINTS
            self._note(number, line, Fate.DROPPED if is_print else Fate.LEFT, "it prints" if is_print else _LEFT_WHY)
            return
        launch = find_launch(words)
        if launch is not None:
            if self._launch is not None:
                raise UsageError(
                    f"line {number}: a second line that starts workers; make a file of each, and convert both"
                )
            self._launch = launch
            if launch.rendezvous:
                launch.notes.append(f"{', '.join(launch.rendezvous)}: not needed, {_MEET}")
            for why in launch.decide:
                self._note(number, line, Fate.LEFT, why)
            self._launch_line = number
            self._note(number, line, Fate.TAKEN, "; ".join(launch.notes) or "the command")
            return
        self._other(number, line, first, " ".join(words))

    def _assignment(self, number: int, line: str, name: str, value: str) -> None:
        if name in _MEETING or _FOR_MEETING.search(value):
            self._job_only.add(name)
            self._note(number, line, Fate.DROPPED, _MEET)
        elif OF_THE_JOB.search(value) or self._uses_job_only(value):
            self._job_only.add(name)
            if line.startswith("export"):
                self._note(number, line, Fate.LEFT, "known in the job alone: set it at the script's beginning")
            else:  # where the script gets it, `finish` says so
                self._note(number, line, Fate.DROPPED, "known in the job alone, and not needed by the command")
        else:
            self._before.append((number, line))
            self._note(number, line, Fate.KEPT, _IN_THE_SHELL)

    def _uses_job_only(self, text: str) -> bool:
        return any(re.search(rf"\$\{{?{name}\b", text) for name in self._job_only)

    def _other(self, number: int, line: str, first: str, text: str) -> None:
        if self._launch is not None and first not in (*PRINTS, *_SHELL):
            self._note(
                number, line, Fate.LEFT, "it ran after the training; give it a job of its own: sbatch --dependency"
            )
        elif first in PRINTS:
            self._note(number, line, Fate.DROPPED, "it prints; the run's report and events have these facts")
        elif first in _SHELL:
            self._note(number, line, Fate.DROPPED, "the batch script is written for you")
        elif first in _ENVIRONMENT and not self._uses_job_only(line):
            self._setup.append(_SetupLine(number=number, line=line, text=text))
        elif first in _OF_THE_SHELL and not OF_THE_JOB.search(line) and not self._uses_job_only(line):
            self._before.append((number, line))
            self._note(number, line, Fate.KEPT, _IN_THE_SHELL)
        else:
            self._note(number, line, Fate.LEFT, _LEFT_WHY)

    def finish(self) -> Conversion:
        """Put the command together."""
        launch = self._launch
        if launch is None:
            raise UsageError(
                "no line starts workers: looked for torchrun, python -m torch.distributed.run, accelerate launch, "
                "srun python"
            )
        given = dict(self._options)
        nodes = given.get("--nodes")
        if launch.nnodes and not OF_THE_JOB.search(launch.nnodes) and not self._uses_job_only(launch.nnodes):
            nodes = nodes or launch.nnodes
            if "--nodes" not in given:
                self._options.insert(0, ("--nodes", launch.nnodes))
        options = [*self._options, *self._workers(launch, nodes), *self._environment(launch)]
        words = ["hpc-elastic", "submit"]
        for name, value in options:
            words += [f"{name}={value}"] if name == "--sbatch-arg" else [name, value] if value else [name]
        for word in (*launch.options, *launch.script):
            if OF_THE_JOB.search(word) or self._uses_job_only(word):
                why = "its value is known in the job alone: read the variable in the script"
                self._note(self._launch_line, word, Fate.LEFT, why)
        return Conversion(
            before=tuple(line for _, line in sorted(self._before)),
            words=(*words, *launch.options, *launch.script),
            lines=tuple(sorted(self._lines, key=lambda line: line.number)),
        )

    def _environment(self, launch: Launch) -> list[tuple[str, str]]:
        """``--setup``; what the command or the lines before it need stays there."""
        used = " ".join([*launch.options, *launch.script, *(line for _, line in self._before)])
        known = {one.name for one in self._setup} | {line.partition("=")[0] for _, line in self._before}
        unknown = set(re.findall(r"\$\{?(\w+)", used)) - known - _USERS_OWN
        taken = []
        for one in self._setup:
            is_file = one.text.split()[0] in ("source", ".")
            is_needed = re.search(rf"\$\{{?{one.name}\b", used) is not None if one.name else is_file and bool(unknown)
            if is_needed:
                self._before.append((one.number, one.line))
            if not is_needed or is_file:
                taken.append(one.text)
            self._note(
                one.number, one.line, Fate.KEPT if is_needed else Fate.TAKEN, _IN_THE_SHELL if is_needed else _IN_SETUP
            )
        return [("--setup", shlex.quote("; ".join(taken)))] if taken else []

    def _workers(self, launch: Launch, nodes: str | None) -> list[tuple[str, str]]:
        """``--nproc-per-node`` and GPUs, where a task of srun's was a worker."""
        per_node = self._tasks.get("--ntasks-per-node")
        total = self._tasks.get("--ntasks")
        if per_node is None and total and total.isdigit() and nodes and nodes.isdigit() and not int(total) % int(nodes):
            per_node = str(int(total) // int(nodes))
        found = []
        if launch.is_per_task and per_node is None:
            raise UsageError(
                "srun starts a worker in each task, and how many tasks each node has is not said; add --ntasks-per-node"
            )
        if launch.is_per_task and per_node:
            found.append(("--nproc-per-node", per_node))
        gpus = self._tasks.get("--gpus-per-task")
        if gpus and gpus.isdigit():
            found.append(("--gpus-per-node", str(int(gpus) * int(per_node or 1))))
        return found


_USERS_OWN = {"HOME", "USER", "LOGNAME", "SCRATCH", "WORK", "PWD"}
_LEFT_WHY = "it ran on the first node, before the training: do it before you submit, or at the beginning of the script"
_OF_SLURM: Mapping[str, Option] = {
    name: option for option in job_options.OPTIONS if option.sbatch and not option.repeatable for name in option.names
} | {name: option for option in job_options.OPTIONS if option.dest in ("gpus", "chdir") for name in option.names}
_LONG = {"-n": "--ntasks", "-W": "--wait", "-k": "--no-kill", "-a": "--array", "-V": "--version"}


def check_converted(conversion: Conversion, check: Callable[[Sequence[str]], None]) -> None:
    """Have the command read as it would be at submission, where the shell has nothing to expand in it.

    Raises:
        UsageError: submit would refuse it.
    """
    if not any(char in conversion.command for char in "$`*?~"):
        check(shlex.split(conversion.command)[2:])
    for value in (
        word for name, word in zip(conversion.words, conversion.words[1:], strict=False) if name == "--nodes"
    ):
        if value.replace("-", "").replace(":", "").isdigit():
            parse_nodes(value)

"""An sbatch file that starts workers → the command of this program that does the same, and what became of each line.

Pure: text in, `Conversion` out. What is understood is always in the command; what is not is left to the user, and said.
The shell that submits expands what it knows as well as the job; the rest is expanded in the job, by each worker.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from msgspec import Struct

from hpc_elastic.errors import UsageError
from hpc_elastic.options import job_options
from hpc_elastic.options.launch_line import (
    ENVIRONMENT,
    MEET,
    PER_WORKER,
    LaunchLine,
    find_launch,
    joined,
    option_of_pyxis,
)
from hpc_elastic.options.sbatch import IMPOSSIBLE, NO_HET_JOBS, has_components, split_option
from hpc_elastic.options.shell_text import (
    COUNTS,
    FOR_MEETING,
    MEETING,
    OF_THE_JOB,
    ShellBlock,
    ShellCommand,
    Unit,
    Variables,
    expanded_names,
    parse_script,
    plain,
    units_of,
)
from hpc_elastic.options.table import Option


class LineStatus(str, Enum):
    KEPT = "kept"
    CONVERTED = "taken over"
    DROPPED = "dropped"
    MANUAL = "left to you"


class ConvertedLine(Struct, frozen=True, kw_only=True):
    number: int
    text: str
    status: LineStatus
    why: str


class Conversion(Struct, frozen=True, kw_only=True):
    before: tuple[str, ...]
    words: tuple[str, ...]
    """The command, as a shell reads it: quoted where that is needed, with the file's own variables."""
    after: tuple[str, ...]
    lines: tuple[ConvertedLine, ...]

    @property
    def command(self) -> str:
        return " ".join(self.words)

    @property
    def manual(self) -> tuple[ConvertedLine, ...]:
        return tuple(line for line in self.lines if line.status is LineStatus.MANUAL)


_BEFORE_TRAINING = (
    "it ran on the first node, before the training: do it before you submit, or at the beginning of the script"
)
_PER_NODE = ("--ntasks-per-node", "--ntasks", "--gpus-per-task", "--ntasks-per-gpu")
_LONG = {"-W": "--wait", "-k": "--no-kill", "-V": "--version", **COUNTS}
_OF_SLURM: Mapping[str, Option] = {
    name: option
    for option in job_options.OPTIONS
    if (option.sbatch and not option.repeatable) or option.dest in ("gpus", "chdir")
    for name in option.names
}


def convert(text: str, check: Callable[[Sequence[str]], None]) -> Conversion:
    """Convert an sbatch file; `check` raises UsageError for arguments that submit would refuse."""
    return _Converter(text, check).convert()


class _Converter:
    def __init__(self, text: str, check: Callable[[Sequence[str]], None]) -> None:
        self._script = parse_script(text)
        self._check = check
        self._variables = Variables(self._script)
        self._options: list[tuple[str, str]] = []  # name, raw value (empty: a flag)
        self._lines: list[ConvertedLine] = []
        self._launch = LaunchLine()
        self._start: ShellCommand | None = None
        self._loops: list[ShellBlock] = []
        self._setup_at = 0
        self._inlined: set[str] = set()

    def convert(self) -> Conversion:
        self._directives()
        self._find_start()
        launch, reach = self._launch, self._variables.reach
        units = units_of(self._script, self._start.blocks if self._start else ())
        self._variables.units = units
        kept, setup = self._sort(units)
        self._count()
        for option in launch.options:
            if wrong := self._wrong([option]):
                launch.open.append(wrong)
            else:
                self._options.append(option)
        needed = reach(expanded_names(" ".join([*launch.preamble, *launch.program, *launch.script])))
        for_options = reach(expanded_names(" ".join(value for _, value in self._options)))
        in_job = bool(launch.preamble or needed.job or needed.unknown) and bool(launch.script)
        if in_job:
            self._options = [one for one in self._options if one != ("--no-python", "")]
            once = [unit for unit in needed.units if unit not in setup and self._is_once(unit)]
            here = [*once, *(other for unit in once for other in reach(expanded_names(unit.text)).units)]
        else:
            here = needed.units
        kept += [unit for unit in dict.fromkeys((*for_options.units, *here)) if unit not in kept]
        setup = [unit for unit in setup if unit not in kept]
        self._add_setup(setup)
        words = self._words(for_options.job | for_options.unknown | for_options.open)
        if in_job:
            inner = [unit for unit in needed.units if unit not in (*here, *setup)]
            words += self._in_the_job(inner, needed.open)
            self._note_units(inner, LineStatus.CONVERTED, "each worker does it, before the script")
        else:
            own = ["--python", *launch.program] if launch.program else []
            own += ["--module"] if launch.is_module else []
            words += [_unset(word, needed.open) for word in (*own, *(launch.script or ["SCRIPT"]))]
        self._note_start(needed.open | for_options.open | for_options.job)
        self._note_units(kept, LineStatus.KEPT, "in the shell that submits; the job gets its environment")
        self._note_units([unit for unit in units if unit.defines], LineStatus.DROPPED, "the command does not need it")
        before = [(unit.number, f"export {unit.text}" if in_job and unit in here else unit.text) for unit in kept]
        before += [(loop.number, f"{loop.head}; do") for loop in self._loops]
        if in_job and self._variables.of_loop:
            before.append((1 << 30, f"export {' '.join(sorted(self._variables.of_loop))}"))
        return Conversion(
            before=tuple(line for _, line in sorted(before)),
            words=tuple(words),
            after=("done",) * len(self._loops),
            lines=tuple(sorted(self._lines, key=lambda line: line.number)),
        )

    def _note(self, number: int, text: str, status: LineStatus, why: str) -> None:
        self._lines.append(ConvertedLine(number=number, text=text, status=status, why=why))

    def _note_units(self, units: Sequence[Unit], status: LineStatus, why: str) -> None:
        noted = {line.number for line in self._lines}
        for unit in units:
            if unit.number not in noted:
                self._note(unit.number, unit.text, status, why)

    def _directives(self) -> None:
        first = self._script.commands[0].number if self._script.commands else 1 << 30
        for number, text in self._script.comments:
            if text.startswith("#!"):
                self._note(number, text, LineStatus.DROPPED, "the batch script is written for you")
            elif text.startswith("#SBATCH") and number > first:
                self._note(number, text, LineStatus.DROPPED, "behind the first command, where Slurm ignores it")
            elif text.startswith("#SBATCH"):
                try:
                    words = shlex.split(text.removeprefix("#SBATCH"), comments=True)
                except ValueError as error:
                    self._note(number, text, LineStatus.MANUAL, str(error).lower())
                    continue
                if words and f"{words[-1].rpartition('=')[2]}#" in text:
                    why = "sbatch ends a value at a # without quotes or a \\ in front of it, so this does too"
                    self._note(number, text, LineStatus.MANUAL, why)
                if has_components(words):
                    self._note(number, text, LineStatus.MANUAL, NO_HET_JOBS)
                    first = number
                else:
                    self._directive(number, text, words)

    def _directive(self, number: int, text: str, words: list[str]) -> None:
        while words:
            word = words.pop(0)
            name, equals, value = split_option(word)
            if not word.startswith("-"):
                self._note(number, text, LineStatus.MANUAL, f"{word} is not an option")
                continue
            option = _OF_SLURM.get(name)
            has_value = option is None or (option.metavar is not None and not option.optional_value)
            if not equals and words and not words[0].startswith("-") and has_value:
                value = words.pop(0)
            status, why, options = self._asked(name, value, option)
            if status is LineStatus.CONVERTED and (wrong := self._wrong(options)):
                status, why, options = LineStatus.MANUAL, wrong, []
            self._options += options
            self._note(number, text, status, why)

    def _wrong(self, options: Sequence[tuple[str, str]]) -> str:
        shown = [_option_words(name, plain(value)) for name, value in options if "$" not in value]
        try:
            self._check([word for words in shown for word in words])
        except UsageError as error:
            return str(error)
        return ""

    def _asked(self, name: str, value: str, option: Option | None) -> tuple[LineStatus, str, list[tuple[str, str]]]:
        long = _LONG.get(name, name)
        if long in _PER_NODE:
            self._variables.numbers[long] = value
            return LineStatus.CONVERTED, "one agent is started on each node; it starts the workers", []
        if long == "--signal":
            match = re.search(r"@(\d+)", value)
            grace = [("--grace", match[1])] if match else []
            why = "the notice before the time limit is always asked for"
            return LineStatus.CONVERTED, f"--grace {match[1]}; {why}" if match else why, grace
        if long == "--open-mode":
            return LineStatus.DROPPED, "every attempt appends to the job log", []
        if long == "--no-kill":
            return LineStatus.DROPPED, "--no-kill is always given, so that a run survives the loss of nodes", []
        if of_pyxis := option_of_pyxis(name, shlex.quote(value) if value else ""):
            return LineStatus.CONVERTED, " ".join(of_pyxis), [of_pyxis]
        if option is None and long in IMPOSSIBLE:
            return LineStatus.MANUAL, IMPOSSIBLE[long], []
        if option is None:
            word = joined(name, value)
            return LineStatus.CONVERTED, f"--sbatch-arg={word}", [("--sbatch-arg", shlex.quote(word))]
        shown = next(one for one in option.names if one.startswith("--") and (one == name or not name.startswith("--")))
        self._variables.numbers[shown] = value
        why = " ".join(_option_words(shown, value))
        if shown == "--export" and value and not {"ALL", "NONE", "NIL"} & set(re.split(r"[=,]", value)):
            value = f"ALL,{value}"
            why = f"--export {value}: without ALL the job would not have the environment of the lines before"
        return LineStatus.CONVERTED, why, [(shown, shlex.quote(value) if value else "")]

    def _find_start(self) -> None:
        """The command that starts the workers: the first one by srun or a launcher, else the first Python script."""
        found = [
            (command, launch)
            for command in self._script.commands
            if command.words[:1] not in (["for"], ["case"])
            and (launch := find_launch(_without_condition(command.words), self._variables))
        ]
        found.sort(key=lambda one: (one[1].is_single, not one[1].script))
        if not found:
            last = self._script.commands[-1].number if self._script.commands else 1
            why = "no line that starts workers was found: write the Python script and its arguments in place of SCRIPT"
            self._note(last, "SCRIPT", LineStatus.MANUAL, why)
            return
        self._start, self._launch = found[0]
        self._inlined = {
            name for name in tuple(self._variables.shown) if " " in self._variables.inline(f"${name} ").strip()
        }
        for command, launch in found[1:]:
            if not launch.is_single:
                why = "a second line that starts workers: make a file of it, convert that, and submit it --dependency"
                self._note(command.number, command.text, LineStatus.MANUAL, why)
        for block in self._start.blocks:
            self._around(block)

    def _around(self, block: ShellBlock) -> None:
        launch = self._launch
        names = set(re.findall(r"^for\s+(?:\(\(\s*)?(\w+)", block.head))
        values = self._variables.inline(block.head.partition(" in ")[2])
        used = " ".join([*launch.script, *launch.preamble, *(value for _, value in launch.options)])
        assert self._start is not None
        status, why = LineStatus.MANUAL, "the command is for one start: whether and how often there is one is yours"
        if block.head.endswith("{"):
            return
        if names & expanded_names(self._start.text.replace('"', " ")) - expanded_names(used):
            status, why = LineStatus.DROPPED, "one agent is started on each node"
        elif names and values and not any(name.startswith("SLURM") for name in expanded_names(values)):
            self._loops.append(block)
            self._variables.of_loop.update(names)
            why = "each turn submits a job; --dependency singleton with one --job-name has them run one by one"
        self._note(block.number, block.head, status, why)

    def _sort(self, units: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
        found: dict[LineStatus, list[Unit]] = {LineStatus.KEPT: [], LineStatus.CONVERTED: []}
        is_behind = False
        for unit in units:
            if self._start in unit.commands:
                is_behind = True
                continue
            status, why = self._place(unit, is_behind=is_behind)
            if status in found:
                found[status].append(unit)
            elif why:
                self._note_units([unit], status, why)
        return found[LineStatus.KEPT], found[LineStatus.CONVERTED]

    def _place(self, unit: Unit, *, is_behind: bool) -> tuple[LineStatus, str]:
        """The status of a unit; no reason: it depends on whether its variable is needed."""
        firsts = [plain(command.words[0]) if command.words else "" for command in unit.commands]
        names = expanded_names(unit.text) - unit.defines
        reach = self._variables.reach(names)
        writes = any(
            re.match(r"&?>+\|?[^&]", one) and "/dev/" not in one for c in unit.commands for one in c.redirections
        )
        is_known_here = not (reach.job or reach.open or reach.unknown) and not FOR_MEETING.search(unit.text)
        hostfile = self._launch.hostfile
        is_hostfile = hostfile and re.search(rf"(?<![\w.]){re.escape(hostfile)}(?![\w.])", unit.text)
        if (unit.defines and unit.defines <= set(MEETING)) or (writes and FOR_MEETING.search(unit.text)) or is_hostfile:
            return LineStatus.DROPPED, MEET
        if self._start and any(block.head == f"{firsts[0]}() {{" for block in self._start.blocks):
            return LineStatus.DROPPED, "the function's start is in the command"
        if unit.defines and unit.defines <= self._inlined:
            return LineStatus.DROPPED, "its text is in the command"
        if is_behind and not unit.is_pure():
            return LineStatus.MANUAL, "it ran after the training; give it a job of its own: sbatch --dependency"
        if firsts[0] in ("cd", "mkdir", "ulimit") or (unit.is_pure() and writes and not unit.block):
            if "SLURM_SUBMIT_DIR" in names and firsts[0] == "cd":
                return LineStatus.DROPPED, "a job begins in the folder where it is submitted"
            return (LineStatus.KEPT, "") if is_known_here else (LineStatus.MANUAL, _BEFORE_TRAINING)
        if any(first in ENVIRONMENT for first in firsts) and (not unit.block or unit.is_pure(ENVIRONMENT)):
            if names & PER_WORKER or reach.open:
                return LineStatus.MANUAL, "its value is not known before the workers start: set it in the script"
            return LineStatus.CONVERTED, ""
        if unit.is_pure():
            return LineStatus.DROPPED, "" if unit.defines else "it prints, or is about the batch script itself"
        return LineStatus.MANUAL, _BEFORE_TRAINING

    def _count(self) -> None:
        launch, number = self._launch, self._variables.number
        counts = self._variables.numbers
        counts.update({name: value for name, value in launch.counts.items() if name.startswith("--")})
        nodes = number(counts.get("--nodes") or launch.counts.get("nodes", ""))
        if nodes and "--nodes" not in dict(self._options):
            self._options.insert(0, ("--nodes", nodes))
        self._setup_at = len(self._options)
        tasks = number(counts.get("--ntasks-per-node", "")) or _divided(number(counts.get("--ntasks", "")), nodes)
        workers = launch.counts.get("nproc", "")
        nproc = number(workers) or _divided(number(launch.counts.get("total", "")), nodes)
        is_by_tasks = launch.is_per_task and "--ntasks-per-gpu" not in counts
        is_by_tasks = is_by_tasks and bool(launch.script or tasks not in (None, "1"))
        if launch.is_single and not nproc:
            nproc = "1"
            why = "plain python is one process: take --nproc-per-node out where it may be one for each GPU"
            launch.open.append(why)
        elif is_by_tasks and not nproc:
            nproc = tasks or "1"
            if tasks is None and "--ntasks" in counts:
                launch.open.append("--ntasks without --nodes: give --nodes, and --nproc-per-node")
        elif not nproc and (workers or "total" in launch.counts):
            launch.notes.append("--nproc-per-node: by default one worker for each GPU that Slurm gives the node")
        gpus = number(counts.get("--gpus-per-task", ""))
        self._options += [("--nproc-per-node", nproc)] if nproc else []
        self._options += [("--gpus-per-node", str(int(gpus) * int(tasks or 1)))] if gpus else []

    def _is_once(self, unit: Unit) -> bool:
        """All workers must have the same value, and the shell that submits can give it."""
        is_same_later = re.search(r"\$\((?!\()|`|RANDOM|SECONDS", unit.text) is None
        reach = self._variables.reach(expanded_names(unit.text))
        return not (is_same_later or unit.block or OF_THE_JOB.search(unit.text) or reach.job or reach.unknown)

    def _add_setup(self, setup: Sequence[Unit]) -> None:
        taken: list[Unit] = []
        exports = self._launch.exports
        for unit in (*setup, *(Unit(number=1 << 30, text=text, commands=[]) for text in exports)):
            for other in (*self._variables.reach(expanded_names(unit.text) - unit.defines).units, unit):
                if other not in taken:
                    taken.append(other)
        why = "--setup: bash does it on each node before the workers start"
        self._note_units(taken[: len(taken) - len(exports)], LineStatus.CONVERTED, why)
        if taken:
            self._options.insert(self._setup_at, ("--setup", _quoted([unit.text for unit in taken])))

    def _words(self, missing: set[str]) -> list[str]:
        launch = self._launch
        container = " ".join(value for name, value in self._options if name == "--container-args")
        options = [one for one in self._options if one[0] != "--container-args"]
        if container:
            options.append(("--container-args", f'"{container}"' if "$" in container else shlex.quote(container)))
        if launch.chdir:
            options.append(("--container-workdir" if "--container-image" in dict(options) else "--chdir", launch.chdir))
        words = [_unset(word, missing) for name, value in options for word in _option_words(name, value)]
        return ["hpc-elastic", "submit", *words]

    def _in_the_job(self, inner: Sequence[Unit], missing: set[str]) -> list[str]:
        launch = self._launch
        is_python = ("--no-python", "") not in launch.options
        program = [*(launch.program or ["python"]), "-u", *(["-m"] if launch.is_module else [])] if is_python else []
        command = [*program, *launch.script]
        texts = [*(unit.text for unit in inner), *launch.preamble, f"exec {' '.join(command)}"]
        return ["--no-python", "bash", "-c", _unset(_quoted(texts), missing, "'\"{}\"'")]

    def _note_start(self, missing: set[str]) -> None:
        start, launch = self._start, self._launch
        if start is None:
            return
        if start.redirections or start.separator == "|":
            launch.notes.append("the job log has the output")
        self._note(start.number, start.text, LineStatus.CONVERTED, "; ".join(launch.notes) or "the command")
        for name in sorted(missing):
            launch.open.append(f"${name}: its value is not known before the job runs, or from this file; write it in")
        for why in launch.open:
            self._note(start.number, start.text, LineStatus.MANUAL, why)


def _without_condition(words: list[str]) -> list[str]:
    return words[1:] if words[:1] and words[0] in ("if", "while", "until") else words


def _quoted(texts: Sequence[str]) -> str:
    return shlex.quote(("\n" if "\n" in "".join(texts) else "; ").join(texts))


def _divided(total: str | None, nodes: str | None) -> str | None:
    if not total or not nodes or not (total + nodes).isdigit() or int(total) % int(nodes):
        return None
    return str(int(total) // int(nodes))


def _option_words(name: str, value: str) -> list[str]:
    option = _OF_SLURM.get(name)
    if value and (name in ("--sbatch-arg", "--srun-arg", "--container-args") or (option and option.optional_value)):
        return [f"{name}={value}"]
    return [name, value] if value else [name]


def _unset(word: str, names: set[str], form: str = "{}") -> str:
    """`word` with variables that the shell refuses to expand until the user sets them."""
    for name in names:
        shown = f"ARGUMENT_{name}" if name.isdigit() else "ARGUMENTS" if name in "@*" else name
        pattern = rf"\$\{{{re.escape(name)}(?!\w)(:?-[^}}$]*)?[^}}]*\}}|\${re.escape(name)}(?!\w)"
        word = re.sub(pattern, lambda use, to=shown: form.format(f"${{{to}{use[1] or '?set it first'}}}"), word)  # type: ignore[misc]
    return word

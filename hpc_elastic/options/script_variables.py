"""The variables of an sbatch file: what defines each, and where its value is known. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from msgspec import Struct, field

from hpc_elastic.options.shell_text import (
    ASSIGNMENT,
    ShellBlock,
    ShellCommand,
    ShellScript,
    expanded_names,
    inner_text,
    plain,
    split_words,
)

MEETING = (
    "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NNODES",
    "RDZV_HOST",
)  # fmt: skip
"""Variables by which the nodes meet: workers have their own."""
FOR_MEETING = re.compile(r"scontrol|\bhostname\b|NODELIST|LAUNCH_NODE_IPADDR|/dev/tcp|getent|\bip addr\b")
OF_THE_JOB = re.compile(r"\$\{?SLURM|scontrol|\bhostname\b|/dev/tcp|\bsqueue\b")
PRINTS = (
    "echo", "printf", "date", "hostname", "env", "printenv", "nvidia-smi", "squeue", "scontrol", "pwd", "whoami",
    "which", "type", "ls", "cat", "lscpu", "free", "df", "nvcc", "rocm-smi", "sinfo", "sacct", "head", "tail", "tee",
)  # fmt: skip
SHELL = ("set", "shopt", "umask", "true", ":", "wait", "exit", "trap", "sleep", "[", "test", "break", "continue")
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_USERS_OWN = {"HOME", "USER", "LOGNAME", "SCRATCH", "WORK", "PWD", "RANDOM", "SECONDS", "EPOCHSECONDS", "HOSTNAME"}
COUNTS = {
    name: option
    for option, names in {
        "--nodes": ("-N", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "--ntasks": ("-n", "SLURM_NTASKS"),
        "--ntasks-per-node": ("--tasks-per-node", "SLURM_NTASKS_PER_NODE"),
        "--gpus-per-task": (),
        "--ntasks-per-gpu": (),
        "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    }.items()
    for name in (option, *names)
}
"""Options and variables that count nodes, tasks and GPUs → the option's long name."""


class Unit(Struct, eq=False):
    number: int
    text: str
    commands: list[ShellCommand]
    block: ShellBlock | None = None

    @property
    def defines(self) -> set[str]:
        return {name for command in self.commands for name, _ in assignments(command)}

    def is_pure(self, also: Sequence[str] = ()) -> bool:
        known = (*PRINTS, *SHELL, *also, "for", "case", "{")
        for command in self.commands:
            words = command.words
            if words[:1] and words[0] in ("if", "while", "until"):
                words = words[2 if words[1:2] == ["!"] else 1 :]
            first = plain(words[0]) if words else "cat"
            if not (first in known or first.startswith(("((", "[[ ")) or assignments(command)):
                return False
        return True


class Reach(Struct):
    units: list[Unit] = field(default_factory=list)
    job: set[str] = field(default_factory=set)
    """Variables that have a value in the job alone."""
    unknown: set[str] = field(default_factory=set)
    open: set[str] = field(default_factory=set)


def assignments(command: ShellCommand) -> list[tuple[str, str]]:
    """Variables that a command sets, with raw values; none where it does something else too."""
    words = command.words
    if not words:
        return []
    if words[0] == "for":
        return [(name, "") for name in re.findall(r"^for\s+(?:\(\(\s*)?(\w+)", command.text)]
    while len(words) > 1 and ASSIGNMENT.fullmatch(words[0]) and not ASSIGNMENT.fullmatch(words[-1]):
        words = words[1:]
    if words[0] in ("read", "mapfile", "readarray"):
        return [(words[-1], f"'{command.document}'" if command.document is not None else "")]
    if words[0] in _DECLARES:
        words = [word for word in words[1:] if not word.startswith("-")]
    found = [ASSIGNMENT.fullmatch(word) for word in words]
    return [(match[1], match[2]) for match in found if match] if all(found) else []


def units_of(script: ShellScript, around: Sequence[ShellBlock]) -> list[Unit]:
    units: list[Unit] = []
    for command in script.commands:
        block = next((one for one in command.blocks if one not in around), None)
        if block and units and units[-1].block is block:
            units[-1].commands.append(command)
        elif block:
            text = script.text[block.begin : block.end]
            units.append(Unit(number=block.number, text=text, commands=[command], block=block))
        else:
            units.append(Unit(number=command.number, text=command.text, commands=[command]))
    return units


class Variables:
    def __init__(self, script: ShellScript) -> None:
        self._values: dict[str, str] = {}
        """Raw values that the file itself shows."""
        self.units: list[Unit] = []
        self.shown: set[str] = set()
        """Variables whose text became a part of the command."""
        self.numbers: dict[str, str] = {}
        self.of_loop: set[str] = set()
        """Variables of the loops that stand around the command."""
        for command in script.commands:
            for name, value in assignments(command):
                if any(not block.head.startswith(("{", "for")) for block in command.blocks) or not value:
                    self._values.pop(name, None)
                elif f"{name}+=" in command.text:
                    self._values[name] = f'"{inner_text(self._values.get(name, ""))} {inner_text(value)}"'
                else:
                    before = inner_text(self._values.get(name, ""))
                    self._values[name] = re.sub(rf"\$\{{{name}\}}|\${name}\b", before.replace("\\", r"\\"), value)

    def _shown(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is None or name in MEETING or (re.search(r"\$\((?!\()|`", value) and value[:1] != "("):
            return None
        self.shown.add(name)
        return " ".join(split_words(inner_text(value))) if value[:1] == "(" else inner_text(value)

    def spread(self, words: Sequence[str], depth: int = 0) -> list[str]:
        match = re.fullmatch(r"\"?\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?\})\"?", words[0]) if words else None
        shown = self._shown(match[1] or match[2]) if match and depth < 10 else None
        return self.spread([*split_words(shown), *words[1:]], depth + 1) if shown is not None else list(words)

    def inline(self, text: str, depth: int = 0) -> str:
        def value(match: re.Match[str]) -> str:
            shown = self._shown(match[1] or match[2])
            if shown is None or depth > 9:
                return match[0]
            is_all = match[0] == text.strip()
            return self.inline(shown if is_all else " ".join(shown.split("\n")), depth + 1)

        return re.sub(r"(?<!\\)\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?\})", value, text)

    def number(self, raw: str) -> str | None:
        shown = set(self.shown)
        text = self.inline(inner_text(raw))
        self.shown = shown
        for name, option in COUNTS.items():
            text = re.sub(rf"\$\{{?{name}\b\}}?|\b{name}\b", self.numbers.get(option, name).rpartition(":")[2], text)
        for name in re.findall(r"[A-Za-z_]\w*", text) if "((" in text else ():
            text = re.sub(rf"\b{name}\b", self._values.get(name, name), text)
        if match := re.fullmatch(r"\$\(\(\s*(\d+)\s*([*/+-])\s*(\d+)\s*\)\)", text):
            first, sign, second = int(match[1]), match[2], int(match[3])
            results = {"*": first * second, "+": first + second, "-": first - second, "/": first // (second or 1)}
            text = str(results[sign])
        return text if re.fullmatch(r"\d+([-:]\d+)?|gpu|auto|cpu", text) else None

    def reach(self, names: Iterable[str]) -> Reach:
        found = Reach()
        waiting, seen = list(names), set(_USERS_OWN)
        while waiting:
            name = waiting.pop()
            units = [unit for unit in self.units if name in unit.defines]
            if (name in seen or name in self.of_loop) and (not units or name not in _USERS_OWN):
                continue
            seen.add(name)
            if name in MEETING or (not units and name.startswith("SLURM")):
                found.job.add(name)
            elif name.isdigit() or name in "@*" or any(not unit.is_pure() or "srun" in unit.text for unit in units):
                found.open.add(name)
            elif not units:
                found.unknown.add(name)
            for unit in units if name not in (*found.job, *found.open) else ():
                if unit not in found.units:
                    found.units.append(unit)
                    waiting += expanded_names(unit.text) - unit.defines
                    if OF_THE_JOB.search(unit.text) or (unit.block and re.search(r"\s-[defsr]\s", unit.text)):
                        found.job.add(name)
        found.units.sort(key=lambda unit: unit.number)
        return found

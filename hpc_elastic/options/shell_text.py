"""A bash script as its commands, with the words and blocks of each; and its variables. Pure.

A word is raw: with the quotes and variables that it has in the file. What is no shell is read as far as it goes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from msgspec import Struct, field

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_PIECE = re.compile(
    r"""[^\s'"\\;&|<>()`$]+|\\[^\n]|'[^']*'|`[^`]*`|"(?:[^"\\]|\\.)*"|\$'(?:[^'\\]|\\.)*'|\$\{[^}]*\}|\$(?!\()""",
    re.DOTALL,
)
_REDIRECTION = re.compile(r"(?:\d+|&)?(?:<<<|<<-?|<>|>>|[<>])[&|]?(?!\()[ \t]*")
_OPERATOR = re.compile(r";;|&&|\|\||\|&|[;&|()\n]")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
_OPENS = ("if", "for", "while", "until", "case", "select", "{")
_CLOSES = ("fi", "done", "esac", "}")
_LEADS = ("then", "else", "do", "!", "elif")


class ShellBlock(Struct, eq=False):
    head: str
    number: int
    begin: int
    end: int = 0


class ShellCommand(Struct, eq=False):
    number: int
    text: str
    """The source, with redirections, without a comment behind it."""
    words: list[str] = field(default_factory=list)
    redirections: list[str] = field(default_factory=list)
    separator: str = "\n"
    """Ends it: ``|``, ``&&``, ``;`` or a line break."""
    document: str | None = None
    blocks: tuple[ShellBlock, ...] = ()


class ShellScript(Struct):
    text: str
    commands: list[ShellCommand] = field(default_factory=list)
    comments: list[tuple[int, str]] = field(default_factory=list)


def parse_script(text: str) -> ShellScript:
    return _Parser(text).parse()


def split_words(text: str) -> list[str]:
    return [word for command in parse_script(text).commands for word in command.words]


def plain(word: str) -> str:
    """A raw word without its quotes, where nothing in it is the shell's; else as it is."""
    if any(char in word for char in "$`"):
        return word
    try:
        (value,) = shlex.split(word)
        return value
    except ValueError:
        return word


def inner_text(word: str) -> str:
    """The text in a raw word or array, one level of quotes taken off."""
    if word[:1] == "(" and word[-1:] == ")":
        return word[1:-1]
    if len(word) > 1 and word[0] == word[-1] == "'" and "'" not in word[1:-1]:
        return word[1:-1]
    if len(word) > 1 and word[0] == word[-1] == '"':
        return re.sub(r"\\([$`\"\\])", r"\1", word[1:-1].replace("\\\n", " "))
    return word


def expanded_names(text: str) -> set[str]:
    for quoted in (r'"(?:[^"\\]|\\.)*"', r"'[^']*'"):  # an apostrophe within double quotes begins nothing
        text = re.sub(
            rf"{quoted}|\\.",
            lambda part: re.sub(r"\\.", "", part[0]).replace("'", " ") if part[0][0] == '"' else "",
            text,
            flags=re.DOTALL,
        )
    return set(re.findall(r"\$\{?[#!]?(\w+|[@*])", text)) | {
        name for part in re.findall(r"\$\(\((.*?)\)\)", text) for name in re.findall(r"[A-Za-z_]\w*", part)
    }


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._script = ShellScript(text=text)
        self._command: ShellCommand | None = None
        self._begin = 0
        self._end = 0
        self._blocks: list[ShellBlock] = []
        self._function = ""
        self._documents: list[tuple[ShellCommand, str]] = []

    def parse(self) -> ShellScript:
        text = self._text
        while self._at < len(text):
            char = text[self._at]
            if char in " \t\r" or text.startswith("\\\n", self._at):
                self._at += 1 + (char == "\\")
            elif char == "#":
                end = text.find("\n", self._at)
                end = len(text) if end < 0 else end
                if self._at == 0 or text[self._at - 1] == "\n":
                    self._script.comments.append((self._number(), text[self._at : end].rstrip()))
                self._at = end
            elif match := _REDIRECTION.match(text, self._at):
                self._redirect(match)
            elif match := _OPERATOR.match(text, self._at):
                self._operator(match[0])
            else:
                self._word()
        self._finish("\n")
        for block in self._blocks:
            block.end = len(text)
        return self._script

    def _number(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _current(self) -> ShellCommand:
        if self._command is None:
            self._command = ShellCommand(number=self._number(), text="", blocks=tuple(self._blocks))
            self._begin = self._at
        return self._command

    def _redirect(self, match: re.Match[str]) -> None:
        command = self._current()
        self._at = self._end = self._word_end(match.end())
        target = self._text[match.end() : self._at]
        if match[0].strip() in ("<<", "<<-"):
            self._documents.append((command, target))
        else:
            command.redirections.append(match[0].strip() + target)

    def _operator(self, operator: str) -> None:
        if operator == "(" and self._text.startswith("((", self._at):  # arithmetic
            command = self._current()
            begin, self._at = self._at, self._closing(self._at + 1)
            command.words.append(self._text[begin : self._at])
            self._end = self._at
            return
        self._at += len(operator)
        in_case = bool(self._blocks) and self._blocks[-1].head.startswith("case ")
        if operator == "(" and self._command is not None and self._command.words:
            self._function = self._command.words[-1]
            self._command = None
        if in_case and (operator == ")" or (operator == "|" and re.match(r"[^\n|;]*\)", self._text[self._at :]))):
            self._command = None
        self._finish(operator)
        if operator == "\n":
            self._read_documents()

    def _word(self) -> None:
        text = self._text
        begin = self._at
        if array := _ARRAY.match(text, begin):
            self._at = self._closing(array.end())
        elif text.startswith("[[ ", begin) and (end := text.find("]]", begin)) > 0:
            self._at = end + 2
        else:
            self._at = max(self._word_end(begin), begin + 1)
        word = text[begin : self._at]
        end, self._at = self._at, begin
        command = self._current()
        self._at = self._end = end
        if not command.words and word in (*_LEADS, *_CLOSES):
            self._command = None
            if word in _CLOSES and self._blocks:
                self._blocks.pop().end = end
            return
        command.words.append(word)
        if len(command.words) == 1 and word == "{":
            head = f"{self._function}() {{" if self._function else word
            self._function = ""
            self._blocks.append(ShellBlock(head=head, number=command.number, begin=begin))
            self._command = None
        elif command.words[0] == "case" and word == "in" and len(command.words) == 3:
            self._finish("\n")

    def _word_end(self, at: int) -> int:
        while at < len(self._text):
            if match := _PIECE.match(self._text, at):
                at = match.end()
            elif self._text.startswith(("$(", "<(", ">("), at):
                at = self._closing(at + 2)
            else:
                break
        return at

    def _closing(self, at: int) -> int:
        depth = 1
        while at < len(self._text) and depth:
            if match := re.compile(r"\s#[^\n]*|'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.", re.DOTALL).match(self._text, at):
                at = match.end()
                continue
            depth += {"(": 1, ")": -1}.get(self._text[at], 0)
            at += 1
        return at

    def _finish(self, separator: str) -> None:
        command, self._command = self._command, None
        if command is None or not (command.words or command.redirections):
            return
        command.text = self._text[self._begin : self._end]
        command.separator = separator
        if command.words and command.words[0] in _OPENS:
            self._blocks.append(ShellBlock(head=command.text, number=command.number, begin=self._begin))
            command.blocks = tuple(self._blocks)
        self._script.commands.append(command)

    def _read_documents(self) -> None:
        for command, target in self._documents:
            delimiter = plain(target)
            found = re.compile(rf"^\t*{re.escape(delimiter)}[ \t]*$", re.MULTILINE).search(self._text, self._at)
            end, behind = (found.start(), found.end() + 1) if found else (len(self._text),) * 2
            command.document = self._text[self._at : end]
            command.text += f"\n{command.document}{delimiter}"
            self._at = behind
        self._documents.clear()


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

"""A bash script as its commands: words, separators, here-documents and the blocks around each. Pure.

A word is raw: with the quotes and variables that it has in the file. What is no shell is read as far as it goes.
"""

from __future__ import annotations

import re
import shlex

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

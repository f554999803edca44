"""``hpc-elastic convert FILE``: an sbatch file that starts torchrun as one command, and what became of each line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import click

from hpc_elastic.base.text import fit, plural
from hpc_elastic.cli.main import print_note
from hpc_elastic.errors import UsageError
from hpc_elastic.options.convert import convert
from hpc_elastic.options.run_request import ALL_OPTIONS, REFUSED, check_values
from hpc_elastic.options.table import parse
from hpc_elastic.output.terminal import each_line, one_line

_LARGEST = 1 << 20
_WIDTH = 100

PARAMETERS = (click.Argument(["file"], metavar="FILE", type=click.Path()),)
NOTE = "FILE: an sbatch file; -: standard input"


def run(args: SimpleNamespace) -> int:
    found = convert(_read(args.file), lambda argv: check_values(parse(argv, ALL_OPTIONS, refused=REFUSED)))
    last = (0, "")
    for line in found.lines:
        if last != (line.number, line.text):
            last = line.number, line.text
            sys.stderr.write(f"{line.number:>4}  {fit(one_line(line.text), _WIDTH)}\n")
        sys.stderr.write(f"      {line.status.value}: {one_line(line.why)}\n")
    sys.stderr.flush()
    lines, current = [], ""
    for word in found.words:
        if current and len(current) + len(word) + 3 > _WIDTH and word.startswith("-"):
            lines.append(f"{current} \\")
            current = f"    {word}"
        else:
            current = f"{current} {word}" if current else word
    sys.stdout.write(each_line("\n".join([*found.before, *lines, current, *found.after]) + "\n"))
    sys.stdout.flush()
    if found.manual:
        print_note(f"{plural(len(found.manual), 'point')} left to you (above): decide about each before you submit")
    return 1 if found.manual else 0


def _read(name: str) -> str:
    try:
        data = sys.stdin.buffer.read(_LARGEST + 1) if name == "-" else _read_file(Path(name))
        if len(data) > _LARGEST:
            raise UsageError(f"{name} is larger than {_LARGEST} bytes, so no sbatch file")
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"{name} can't be read: {error.strerror}") from None


def _read_file(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a FIFO keeps nobody waiting
        return file.read(_LARGEST + 1) or b""

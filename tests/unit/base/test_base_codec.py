"""`hpc_elastic.base.codec`: strict about types, tolerant of everything else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct, field

from hpc_elastic.base import codec
from hpc_elastic.base.files import Unreadable, parse_json, read_json


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Spot(Struct, frozen=True, array_like=True):
    x: int
    y: float = 0.0


class Sheet(Struct, frozen=True, kw_only=True, rename={"long_name": "n"}):
    long_name: str
    colour: Colour = Colour.RED
    spots: tuple[Spot, ...] = ()
    by_rank: Mapping[int, str] = field(default_factory=dict)
    folder: Path = Path("/")
    step: int | None = None


WHOLE = Sheet(
    long_name="caf\udce9",  # of a path that is not UTF-8
    colour=Colour.BLUE,
    spots=(Spot(1), Spot(2, 0.5)),
    by_rank={3: "x"},
    folder=Path("/a/b"),
    step=7,
)


def test_there_and_back_through_a_file(tmp_path: Path) -> None:
    codec.save(tmp_path / "sheet.json", WHOLE)
    assert codec.load(tmp_path / "sheet.json", Sheet) == WHOLE
    value = json.loads((tmp_path / "sheet.json").read_bytes())
    assert value["version"] == 1
    assert value["spots"] == [[1, 0.0], [2, 0.5]]


def test_there_and_back_as_a_line() -> None:
    line = codec.dumps(WHOLE)
    assert "\n" not in line
    assert codec.loads(Sheet, line) == WHOLE
    assert codec.loads(Spot, codec.dumps(Spot(4))) == Spot(4)


def test_what_the_place_of_a_record_says_is_not_written() -> None:
    value = codec.to_json(WHOLE, without=("n",))
    assert "n" not in value
    assert codec.from_json(Sheet, json.loads(json.dumps(value)), n=WHOLE.long_name) == WHOLE


def test_a_newer_and_an_older_record_are_read() -> None:
    assert codec.from_json(Sheet, {"n": "x", "unheard_of": 1}) == Sheet(long_name="x")


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        None,
        "text",
        {"n": None},
        {"n": 3},
        {"n": "x", "colour": "green"},
        {"n": "x", "spots": [["a"]]},
        {"n": "x", "spots": [[]]},
        {"n": "x", "step": "7"},
        {"n": "x", "step": True},
        {"n": "x", "folder": 3},
        {"n": "x", "by_rank": {"one": "x"}},
        {"n": "x", "colour": "\udc80"},
        {"n": "x", "\udc80": 1},
    ],
)
def test_another_value_is_refused(value: Any) -> None:
    with pytest.raises(codec.UnreadableRecordError):
        codec.from_json(Sheet, value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"n": 1}', "[" * 100_000])
def test_a_damaged_line_is_refused(text: str) -> None:
    with pytest.raises(codec.UnreadableRecordError):
        codec.loads(Sheet, text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "missing"),
        ('{"version": 1', "unreadable: "),
        ("[]", "unreadable: holds a list, not an object"),
        ('{"n": "x"}', "has format version None; this program reads 1"),
        ('{"version": 2, "n": "x"}', "has format version 2; this program reads 1"),
        ('{"version": 1, "n": 5}', "unreadable: Expected `str`, got `int` - at `$.n`"),
    ],
)
def test_a_file_that_holds_no_record_is_a_fact(text: str | None, why: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "sheet.json").write_text(text)
    found = codec.load(tmp_path / "sheet.json", Sheet)
    assert isinstance(found, Unreadable)
    assert found.startswith(why)


def test_of_a_list_the_readable_records_are_left() -> None:
    assert codec.readable_items(Spot, [[1], "x", [2, "y"], [3, 4.0]]) == (Spot(1), Spot(3, 4.0))
    assert codec.readable_items(Spot, {"0": [1]}) == ()


def test_of_a_damaged_record_the_readable_fields_are_left() -> None:
    value = {"n": 5, "colour": "green", "step": 3, "folder": "/x", "unheard_of": 1}
    assert codec.readable_fields(Sheet, value) == {"step": 3, "folder": Path("/x")}


@pytest.mark.parametrize(
    ("digits", "value"),
    [
        ("9" * 19, int("9" * 19)),
        ("9" * 20, (1 << 63) - 1),
        ("1" + "0" * 5000, (1 << 63) - 1),
        ("-" + "9" * 400, 1 - (1 << 63)),
    ],
)
def test_an_integer_that_another_wrote_ends_at_64_bits(tmp_path: Path, digits: str, value: int) -> None:
    """A larger one is no float, no time, and beyond 4,300 digits no text either."""
    raw = f'{{"at": [{digits}], "text": "{"7" * 30}"}}'
    assert parse_json(raw) == parse_json(raw.encode()) == {"at": [value], "text": "7" * 30}
    (tmp_path / "x.json").write_text(raw)
    assert read_json(tmp_path / "x.json") == {"at": [value], "text": "7" * 30}
    assert codec.loads(Spot, f"[{digits}]") == Spot(value)


FIRST_USES = """
import sys, threading, types
from hpc_elastic.base import codec

SOURCE = '''
from __future__ import annotations
from enum import Enum
from msgspec import Struct

class Kind(Enum):
    A = "a"

class Part(Struct, frozen=True, kw_only=True):
    kind: Kind
    names: tuple[str, ...] = ()

class Whole(Struct, frozen=True, kw_only=True):
    kind: Kind
    parts: dict[str, Part] = {}
    last: Part | None = None
'''
sys.setswitchinterval(1e-6)
for number in range(150):
    module = sys.modules[f"fresh{number}"] = types.ModuleType(f"fresh{number}")
    exec(SOURCE, module.__dict__)
    together = threading.Barrier(8)

    def read():
        together.wait()
        value = {"kind": "a", "parts": {"x": {"kind": "a", "names": ["y"]}}, "last": {"kind": "a"}}
        assert codec.from_json(module.Whole, value).last.kind is module.Kind.A

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_may_read_the_first_records_of_a_class_at_once() -> None:
    """msgspec 0.22 crashes there, unless it has looked at the class before: seen as an agent's segmentation fault."""
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")

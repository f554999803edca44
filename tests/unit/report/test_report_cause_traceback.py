"""The traceback in the text report: its frames and the exception are what there is room for, whatever was printed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hpc_elastic.report.render_text import _traceback
from tests.rigs.run_builder import make_failure

FRAMES = [
    line
    for depth in range(20)
    for line in (f'  File "/home/ann/train.py", line {depth}, in f{depth}', f"    f{depth + 1}()")
]


def shown(message: str, *, lines: int | None = 15, frames: list[str] = FRAMES) -> list[str]:
    text = "\n".join(["Traceback (most recent call last):", *frames, message])
    failure = replace(make_failure(0, at=1, exception="ValueError: x"), message=message, traceback=text)
    return [line.strip() for line in _traceback(failure, 200, lines, lost="")]


def test_a_long_message_leaves_room_for_the_frames() -> None:
    """As where something that runs at the exit has printed 38 lines after the exception."""
    told = shown("ValueError: bad batch\n" + "\n".join(f"bye {n}" for n in range(38)))
    assert len(told) <= 15
    assert told[-1] == "... 36 more lines (--all shows them)"
    assert told[-4:-1] == ["ValueError: bad batch", "bye 0", "bye 1"]
    assert told[-5] == "f20()"
    assert told[-6].endswith("in f19")
    assert told[1].endswith("lines above (--all shows them)")


def test_a_short_stack_leaves_its_room_to_the_message() -> None:
    told = shown("ValueError: bad batch\n" + "\n".join(f"field {n}" for n in range(6)), frames=FRAMES[-2:])
    assert told[-1] == "field 5"
    assert told[1].endswith("in f19")


@pytest.mark.parametrize("lines", [4, 6, 15, 20])
def test_never_more_than_asked_for_and_the_exception_is_there(lines: int) -> None:
    for more in (0, 1, 2, 5, 60):
        told = shown("\n".join(["ValueError: bad batch", *(f"bye {n}" for n in range(more))]), lines=lines)
        assert len(told) <= lines, (more, told)
        assert "ValueError: bad batch" in told or lines == 4, (more, told)


def test_what_a_message_quotes_stands_at_its_end() -> None:
    quoted = "\n".join(["Original Traceback (most recent call last):", *FRAMES, "KeyError: 'label'"])
    told = shown(f"KeyError: Caught KeyError in DataLoader worker process 0.\n{quoted}")
    assert told[-1] == "KeyError: 'label'"
    assert told[-3].endswith("in f19")


def test_all_of_it_on_demand() -> None:
    told = shown("ValueError: bad batch\n" + "\n".join(f"bye {n}" for n in range(38)), lines=None)
    assert told[-1] == "bye 37"
    assert len(told) == 1 + len(FRAMES) + 39

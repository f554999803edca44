"""The options about hangs and progress: what reaches run.json, and what is refused by name."""

from __future__ import annotations

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.options.table import parse
from hpc_elastic.options.worker_options import OPTIONS, REFUSED, worker_fields


def fields(*argv: str) -> dict[str, object]:
    return worker_fields(parse(argv, OPTIONS, refused=REFUSED, env={}))


def test_what_was_asked_for_reaches_the_run() -> None:
    given = fields("--section-timeouts", "setup:900,step:auto", "--restart-steps=500", "--restart_window", "3600")
    assert given["section_timeouts"] == "setup:900,step:auto"
    assert given["restart_steps"] == 500
    assert given["restart_window"] == 3600.0


def test_without_them_nobody_is_judged_and_nothing_is_refilled() -> None:
    assert not {"section_timeouts", "restart_steps", "restart_window"} & set(fields())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--section-timeouts", "step"), "--section-timeouts step: 'step'"),
        (("--section-timeouts", "step:soon"), "'soon' is not a number of seconds"),
        (("--section-timeouts", "load:auto"), "'load:auto'"),
        (("--restart-steps", "0"), "--restart-steps 0"),
        (("--restart-steps", "many"), "--restart-steps many"),
        (("--restart-window", "-1"), "--restart-window -1"),
    ],
)
def test_what_cannot_be_right_is_named(argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        fields(*argv)
    assert words in str(caught.value)

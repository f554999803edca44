"""``--template`` on a command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.options import job_options
from hpc_elastic.options.run_request import asked_by, read_template
from hpc_elastic.options.table import Parsed, parse

TEXT = """#!/bin/bash
#SBATCH -N 4 --time=1:00:00 --licenses matlab:2 --no-requeue
#SBATCH --exclusive -p gpu
@SBATCH_LINES@
trap '' USR2
exec @COMMAND@
"""


def read(*argv: str) -> Parsed:
    return parse([*argv, "--template", "t.sh", "train.py"], job_options.OPTIONS, refused={})


def test_its_lines_count_where_nothing_else_says_so(tmp_path: Path) -> None:
    (tmp_path / "t.sh").write_text(TEXT)
    text, parsed = read_template(read("-t", "30"), tmp_path, {"SBATCH_PARTITION": "cpu"})
    assert text == TEXT
    assert (parsed.get("nodes"), parsed.get("time"), parsed.get("requeue")) == ("4", "30", "0")
    assert parsed.get("partition") is None, "the variable wins, as with sbatch"
    assert parsed.get("exclusive") == ""
    assert parsed.source("nodes", "") == "t.sh: -N"


def test_words_that_this_program_does_not_know_are_left_alone() -> None:
    words = ["--frobnicate", "matlab:2", "-N4", "-L", "x", "--exclusive=user", "--requeue", "-t"]
    assert asked_by(words) == {
        "nodes": ("-N", "4"),
        "licenses": ("-L", "x"),
        "exclusive": ("--exclusive", "user"),
        "requeue": ("--requeue", "1"),
    }


def test_all_that_is_missing_stands_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "t.sh").write_text("#!/bin/bash\necho @COMMAND@\n")
    with pytest.raises(UsageError) as raised:
        read_template(read(), tmp_path, {})
    said = str(raised.value)
    assert said.startswith("--template t.sh: ")
    for word in ("@SBATCH_LINES@ is missing", "trap '' USR2 is missing", "started with exec"):
        assert word in said
    assert "\n" not in said


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_one_that_can_not_be_read(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "t.sh").write_bytes(content)
    with pytest.raises(UsageError, match=r"^--template t.sh"):
        read_template(read(), tmp_path, {})

"""The options about rotated output: what reaches run.json, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.options.table import parse
from hpc_elastic.options.worker_options import OPTIONS, REFUSED, worker_fields
from hpc_elastic.run.log_pieces import PieceLimit
from hpc_elastic.run.spec import EntryKind, Entrypoint, RunSpec, load_run_spec


def fields(*argv: str) -> dict[str, object]:
    return worker_fields(parse(argv, OPTIONS, refused=REFUSED, env={}))


def _spec(**changes: object) -> RunSpec:
    entry = Entrypoint(kind=EntryKind.SCRIPT, target="t.py")
    return RunSpec(run_id="r", uid="u", name="n", created_ns=0, entrypoint=entry, cwd="/", **changes)  # type: ignore[arg-type]


def test_what_was_asked_for_reaches_the_agents(tmp_path: Path) -> None:
    given = fields("--log-max-size", "1G", "--log_max_files=7")
    assert given["log_max_size"] == 1 << 30
    assert given["log_max_files"] == 7
    _spec(log_max_size=1 << 30, log_max_files=7).save(tmp_path / "run.json")
    assert load_run_spec(tmp_path / "run.json").log_limit == PieceLimit(size=1 << 30, count=7)


def test_without_them_nothing_is_rotated() -> None:
    assert not {"log_max_size", "log_max_files"} & set(fields())
    assert _spec().log_limit is None
    assert _spec(log_max_size=1 << 20).log_limit == PieceLimit(size=1 << 20, count=5)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--log-max-size", "big"), "--log-max-size 'big': give a size such as 500M or 1G"),
        (("--log-max-size", "0"), "--log-max-size 0: give from 64K to"),
        (("--log-max-size", "1k"), "--log-max-size 1k: give from 64K to"),
        (("--log-max-size", "-1G"), "--log-max-size '-1G'"),
        (("--log-max-size", "1G", "--log-max-files", "1"), "--log-max-files 1: give a whole number from 2 to 1000"),
        (("--log-max-files", "4"), "--log-max-files 4: nothing is rotated without a size; give --log-max-size too"),
    ],
)
def test_what_cannot_be_right_is_named(argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        fields(*argv)
    assert words in str(caught.value)

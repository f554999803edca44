"""Options that become one field of `RunSpec`: what they give, and what is refused by name."""

from __future__ import annotations

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.options.run_request import ALL_OPTIONS, REFUSED, spec_fields
from hpc_elastic.options.table import parse
from hpc_elastic.run.log_pieces import PieceLimit
from hpc_elastic.run.option_values import Check, GrowPolicy, MetricsTarget
from hpc_elastic.run.spec import EntryKind, Entrypoint, RunSpec


def fields(*argv: str) -> dict[str, object]:
    return spec_fields(parse(argv, ALL_OPTIONS, refused=REFUSED))


def test_nothing_is_given_by_default() -> None:
    assert fields() == {}


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--restart_window", "3600"], "restart_window", 3600.0),
        (["--grow=now"], "grow", GrowPolicy.NOW),
        (["--health-checks=tmp=1K"], "health_checks", {Check.TMP: 1024.0}),
        (["--health-check", "/a/b.sh -x"], "health_check", ("/a/b.sh", "-x")),
        (["--health-check-timeout", "5"], "health_check_timeout", 5.0),
        (["--metrics", "prometheus:/var/x.prom"], "metrics", MetricsTarget(path="/var/x.prom")),
        (["--log-max-size", "1G", "--log_max_files=7"], "log_max_files", 7),
        (["--log-max-size", "1G"], "log_max_size", 1 << 30),
        (["--sbatch-arg=-Lx", "--sbatch-arg=--nice"], "sbatch_args", ("-Lx", "--nice")),
    ],
)
def test_what_was_asked_for(argv: list[str], field: str, value: object) -> None:
    assert fields(*argv)[field] == value


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--health-check", "'open"], "--health-check 'open"),
        (["--metrics", "jsonl:/x"], "--metrics 'jsonl:/x': JSON lines were removed; give prometheus:FILE.prom"),
        (["--log-max-size", "0"], "--log-max-size 0: give from 64K to"),
        (["--log-max-files", "4"], "--log-max-files 4: nothing is rotated without a size; give --log-max-size too"),
        (
            ["--health-checks", "default,network"],
            "--health-checks default,network: network was removed; hpc-elastic doctor --nodes N measures it",
        ),
        (["--bad-nodes=jobs"], "--bad-nodes jobs: memory across jobs was removed; give run, and"),
        (["--run-id=-x"], "--run-id -x: a run id has"),
        (["--run-id=task-3"], "--run-id task-3: this name is used for folders in a run directory"),
    ],
)
def test_what_cannot_be_right_is_named(argv: list[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        fields(*argv)
    assert str(caught.value).startswith(words)


def test_output_files_are_rotated_where_a_size_is_given() -> None:
    entry = Entrypoint(kind=EntryKind.SCRIPT, target="t.py")
    plain = RunSpec(run_id="r", uid="u", name="n", created_ns=0, entrypoint=entry, cwd="/")
    assert plain.log_limit is None
    limited = RunSpec(run_id="r", uid="u", name="n", created_ns=0, entrypoint=entry, cwd="/", log_max_size=1 << 20)
    assert limited.log_limit == PieceLimit(size=1 << 20, count=5)

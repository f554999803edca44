"""What the tests on a GPU stand on, as far as it needs none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import check
from tests.rigs.gpu import Machine, memory_readings, render
from tests.rigs.torch_ranks import SHARING, share

MACHINE = Machine(
    gpu="NVIDIA X, 80 GiB, 9.0", count=1, driver="580.1", torch="2.11.0+cu130", nccl="2.28.9", python="3.12.3"
)


def test_the_table_has_the_machine_what_was_seen_and_what_did_not_pass() -> None:
    outcomes = {"test_a": "passed", "test_b": "failed: left | right\nmore", "test_c": "skipped: no pipe"}
    assert render(MACHINE, day="2027-01-02", seen=[("out of memory", "root; 7 s")], outcomes=outcomes) == (
        "| | 2027-01-02 |\n"
        "| --- | --- |\n"
        "| GPU | NVIDIA X, 80 GiB, 9.0 |\n"
        "| driver | 580.1 |\n"
        "| PyTorch | 2.11.0+cu130, Python 3.12.3 |\n"
        "| NCCL | 2.28.9 |\n"
        "| tests | 1 passed, 1 failed, 1 skipped |\n"
        "| out of memory | root; 7 s |\n"
        "| test_b | failed: left \\| right more |\n"
        "| test_c | skipped: no pipe |\n"
    )


def test_one_reason_for_all_stands_in_the_table_once() -> None:
    machine = Machine(reason="needs a GPU: torch sees none")
    outcomes = dict.fromkeys(("test_a", "test_b"), f"skipped: {machine.reason}")
    table = render(machine, day="2027-01-02", seen=[], outcomes=outcomes)
    assert table.count("torch sees none") == 1
    assert "| tests | 0 passed, 0 failed, 2 skipped |" in table


def test_readings_of_memory_that_are_cut_short_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "memory.txt").write_text("1.5 100\n1.6 200\n1.7 30")
    assert memory_readings(tmp_path / "memory.txt") == [(1.5, 100), (1.6, 200)]


def test_each_rank_is_a_host_of_its_own_where_that_is_the_way() -> None:
    environ: dict[str, str] = {}
    share("NCCL_HOSTID", 1, environ)
    assert environ["NCCL_HOSTID"] == "host-1"
    assert not SHARING["as it is"]


def test_a_record_is_of_the_gpu_tier_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check.main(["--tier", "unit", "--record", "seen.md"])
    assert "--record: only --tier gpu has something to record" in capsys.readouterr().err

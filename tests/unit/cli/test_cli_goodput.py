"""``list --goodput``, ``status``'s line of it, and ``what-if``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.cli.main import main
from hpc_elastic.cli.what_if import _of_costs
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.goodput import goodput_of
from hpc_elastic.report.measured_costs import MeasuredCosts
from tests.rigs.run_builder import RunBuilder
from tests.unit.report.test_report_advice import failing_run

MODEL = {
    "nodes": 256, "mtbf_node": 30 * 86400, "checkpoint_every": 1800, "checkpoint_seconds": 40, "restart_seconds": 25,
    "start_seconds": 120, "queue_seconds": 3600,
}  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    for name in ("20261118T110640-a", "20261118T110641-b"):
        failing_run(tmp_path / "runs" / name)
    return tmp_path / "runs"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(MODEL))
    return path


def test_list_shows_where_the_time_of_all_runs_went(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--goodput", "--no-slurm", "--runs-dir", str(runs)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["goodput", "of", "run"]
    goodput = goodput_of(collect_run(next(runs.iterdir())))
    share = f"{100 * (goodput.share or 0):.1f} %"
    assert [share in line for line in lines] == [True] * 3
    assert lines[0].endswith("% to end") or "% in checkpoints" in lines[0]
    assert lines[2].endswith("all 2 runs together")


def test_a_run_without_steps_is_in_the_whole_by_its_uptime(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    builder = RunBuilder(runs / "20261118T110642-c", nodes=2)
    builder.attempt(0)
    builder.round(0, 0, at=10)
    builder.succeeded(0, 0, at=200)
    builder.end(0, at=201, outcome="succeeded", code=0)
    assert main(["list", "--goodput", "--no-slurm", "--runs-dir", str(runs)]) == 0
    _, first, *_, last = capsys.readouterr().out.splitlines()
    assert first.endswith("uptime, since no steps were reported")
    assert last.endswith("all 3 runs together, 1 of them by uptime")


def test_the_parts_in_json_add_up_to_the_whole(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--goodput", "--json", "--no-slurm", "--runs-dir", str(runs)]) == 0
    found = [json.loads(line)["goodput"] for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 2
    for one in found:
        assert sum(one["parts"].values()) == pytest.approx(one["wall"])
        assert one["share"] == pytest.approx(one["parts"]["training"] / one["wall"])
    assert main(["list", "--json", "--no-slurm", "--runs-dir", str(runs)]) == 0
    assert "goodput" not in json.loads(capsys.readouterr().out.splitlines()[0])


def what_if(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(["what-if", *argv, "--json", "--runs", "40"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_if_compares_settings_by_the_same_seed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = what_if(capsys, str(model), "--compare", "spares=0,4", "--compare", "checkpoint-every=15m,30m")
    assert [one["set"] for one in found["settings"]] == [
        {"spares": spares, "checkpoint-every": every} for spares in ("0", "4") for every in ("15m", "30m")
    ]
    for one in found["settings"]:
        assert sum(one["parts"].values()) == pytest.approx(one["wall"])
        assert one["low"] <= one["goodput"] <= one["high"]
    assert found["settings"][2]["goodput"] > found["settings"][0]["goodput"]
    assert what_if(capsys, str(model), "--compare", "spares=0,4", "--compare", "checkpoint-every=15m,30m") == found
    assert what_if(capsys, str(model), "--seed", "1") != what_if(capsys, str(model), "--seed", "2")


def test_what_json_printed_is_read_again(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = what_if(capsys, str(model), "--spares", "3")
    again = tmp_path / "again.json"
    again.write_text(json.dumps(found))
    assert what_if(capsys, str(again)) == {**found}


def test_what_if_takes_the_numbers_that_a_run_measured(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(next(runs.iterdir()))
    (one,) = what_if(capsys, run, "--work", "1d")["settings"]
    measured = one["model"]
    assert measured["nodes"] == 2
    assert measured["checkpoint_seconds"] == pytest.approx(20.0)
    assert measured["queue_seconds"] == pytest.approx(500.0, abs=20)
    assert one["parts"]["kept"] == pytest.approx(86400)
    (more,) = what_if(capsys, run, "--work", "1d", "--nodes", "256", "--mtbf-node", "30d", "--spares", "2")["settings"]
    assert (more["model"]["nodes"], more["model"]["spares"]) == (256, 2)
    assert more["goodput"] > one["goodput"]


def test_a_time_between_failures_that_was_measured_is_varied(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(next(runs.iterdir()))
    (measured,) = what_if(capsys, run, "--work", "1d")["settings"]
    assert measured["model"]["failures_seen"] == 3
    same = ("--mtbf-node", f"{measured['model']['mtbf_node']:.3f}s")
    for given in (same, ("--compare", "=".join(same).removeprefix("--"))):
        (known,) = what_if(capsys, run, "--work", "1d", *given)["settings"]
        assert known["model"]["failures_seen"] == 0
        assert known["high"] - known["low"] < 0.5 * (measured["high"] - measured["low"])
    assert main(["what-if", run, "--runs", "20"]) == 0
    out = capsys.readouterr().out
    assert " by 3 failures (each simulated run has another one that fits them); checkpoint-every" in out
    assert "loses-node 0.333; work" in out
    assert "\nas assumed  " in out


def test_a_run_that_fails_every_few_seconds_is_simulated_for_less_than_a_week(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    often = ("--mtbf-node", "256s", "--checkpoint-every", "1s", "--checkpoint-time", "0s", "--restart-time", "0s")
    (one,) = what_if(capsys, str(model), *often, "--loses-node", "0", "--runs", "2")["settings"]
    assert (one["model"]["work"], one["is_endless"]) == (5000.0, False)


def test_what_if_prints_a_table_with_what_it_assumes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", str(model), "--runs", "20", "--compare", "spares=0,8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("assumed: nodes 256; mtbf-node 30 d 00 h; checkpoint-every 30 min 00 s")
    assert lines[1] == "20 simulated runs each, seed 0"
    assert [line.split("  ")[0] for line in lines[3:5]] == ["spares 0", "spares 8"]
    assert lines[5].startswith("a checkpoint every 15 min 00 s would cost least, by √(2·T_fail·T_save)")


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("--mtbf-node", "soon"), "--mtbf-node soon: give a time, as in 90s, 30m, 12h, 30d"),
        (("--nodes", "0"), "--nodes 0: give a whole number from 1 on"),
        (("--loses-node", "2"), "give a number from 0 to 1"),
        (("--compare", "spare=1"), "--compare spare=1: give an option with its values"),
        (("--compare", "spares=1", "--compare", "spares=2"), "given twice"),
        (("--spares", "1", "--compare", "spares=0,2"), "--spares 1 and --compare spares"),
        (("--time-limit", "60s"), "a job of 60.0 s has no time for a step"),
        (("--seed", "x"), "--seed x"),
        (("--seed", "99999999999"), "--seed 99999999999: give a number of at most 9 digits"),
        (("--nodes", "9999999999"), "--nodes 9999999999: give a number of at most 9 digits"),
    ],
)
def test_what_makes_no_sense_is_refused(
    model: Path, argv: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["what-if", str(model), *argv]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("field", [*MODEL, "work", "time_limit"])
def test_a_number_without_end_in_a_file_is_refused(
    tmp_path: Path, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.json"
    for value in (float("inf"), float("nan")):
        path.write_text(json.dumps({**MODEL, field: value}))
        assert main(["what-if", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_the_shares_of_a_line_add_up_and_the_best_interval_names_its_setting(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--mtbf-node", "1000h", "--checkpoint-every", "3h", "--compare", "nodes=4,256", "--compare", "spares=0,1")
    found = what_if(capsys, str(model), *argv)
    for one in found["settings"]:
        assert sum(one["shares"].values()) == pytest.approx(1)
        assert one["shares"]["kept"] == pytest.approx(one["goodput"])
    assert main(["what-if", str(model), *argv, "--runs", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in lines[3:7]:
        numbers = [float(text) for text in re.findall(r"([\d.]+) %", line)]
        assert sum(numbers) == pytest.approx(100, abs=0.4)
    assert [line.split(" would")[0] for line in lines[7:]] == [
        "nodes 4, spares 0: a checkpoint every 2 h 21 min",
        "nodes 256, spares 0: a checkpoint every 17 min 41 s",
    ]
    assert main(["what-if", str(model), "--mtbf-node", "60s", "--runs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0].count("checkpoint-every 30 min 00 s"), lines[1]) == (1, "1 simulated run each, seed 0")
    assert lines[-1] == "a checkpoint takes too long for any interval to help: T_fail 234 ms, T_save 40.0 s"


def test_a_run_that_was_requeued_after_each_failure_needs_no_time_of_a_restart() -> None:
    costs = MeasuredCosts(nodes=2, failures=3, time_to_failure=1000.0, start_seconds=70.0, loses_node=1.0)
    assert _of_costs(costs)["restart_seconds"] == 70.0
    assert "restart_seconds" not in _of_costs(replace(costs, loses_node=0.5))


def test_what_is_neither_measured_nor_given_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.json"
    path.write_text('{"nodes": 4}')
    assert main(["what-if", str(path)]) == 2
    assert "give --mtbf-node, --checkpoint-every, --checkpoint-time, --restart-time" in capsys.readouterr().err
    for text in ("{", "[]", '{"x": 1}', '{"nodes": "many", "mtbf_node": 1}'):
        path.write_text(text)
        assert main(["what-if", str(path)]) == 2

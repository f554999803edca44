"""What NCCL's RAS answers, as its documentation and issues show it (tests/data/nccl_ras/README.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_elastic.failures.nccl_ras import (
    Communicator,
    Launches,
    RasReport,
    UnreadableReportError,
    find_culprits,
    parse_json,
)

DATA = Path(__file__).parents[2] / "data" / "nccl_ras"


def read(name: str) -> RasReport:
    return parse_json((DATA / name).read_text())


def culprits(report: RasReport) -> dict[int, str]:
    return {rank: why for each in report.communicators for rank, why in find_culprits(each).items()}


SILENT = "does not answer NCCL's RAS: its process is stopped or gone"


@pytest.mark.parametrize(
    ("name", "version", "whys"),
    [
        ("json_2.28.9_in_order.json", "2.28.9", {}),
        ("json_2.28.9_missing.txt", "2.28.9", {1: SILENT}),  # lacks a comma
        ("json_2.29_missing.json", "2.29.1", {1: SILENT}),
        ("json_2.28.9_straggler.json", "2.28.9", {1: "has launched AllReduce up to #3, 1 other up to #10"}),
    ],
)
def test_who_holds_up_the_others(name: str, version: str, whys: dict[int, str]) -> None:
    report = read(name)
    assert report.version == version
    assert culprits(report) == whys


def test_processes_are_known_by_host_and_pid() -> None:
    assert read("json_2.29_missing.json").communicators[0].processes[1] == ("172.16.64.245", 1524345)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_half_an_answer_is_none(share: float) -> None:
    text = (DATA / "json_2.28.9_straggler.json").read_text()
    with pytest.raises(UnreadableReportError):
        parse_json(text[: int(len(text) * share)])


def of_ranks(*ranks: str, size: str = "2") -> str:
    return f'{{"communicators": [{{"size": {size}, "ranks": [{", ".join(ranks)}]}}]}}'


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", "null", '{"communicators": 7}', "[" * 100_000, '{"a": ' * 100_000, "ERROR: Invalid", "\0"),
        of_ranks('{"rank": 0}', size="1" * 5000),
        of_ranks('{"rank": 1e400}'),
        of_ranks('{"rank": [0]}'),
        of_ranks('{"rank": 0, "collective_counts": {"AllReduce": ' + "9" * 5000 + "}}"),
        of_ranks('{"rank": 0, "host": 7}', '{"rank": "1"}'),
    ],
)
def test_anything_else_is_no_answer(text: str) -> None:
    with pytest.raises(UnreadableReportError):
        parse_json(text)


def test_a_size_costs_nothing() -> None:
    (comm,) = parse_json(of_ranks('{"rank": 0}', '{"rank": 9000000000}', size=str((1 << 63) - 1))).communicators
    assert find_culprits(comm) == {}


def changed(name: str, **status: object) -> RasReport:
    found = json.loads((DATA / name).read_text())
    found["communicators"][0]["ranks"][0]["status"].update(status)
    return parse_json(json.dumps(found))


@pytest.mark.parametrize("status", [{"init_state": 7}, {"destroy_flag": True}, {"abort_flag": True}])
def test_ranks_of_a_communicator_that_is_made_or_destroyed_differ_rightly(status: dict[str, object]) -> None:
    assert not changed("json_2.28.9_straggler.json", **status).communicators[0].trouble


def test_sends_and_receives_may_differ_and_are_progress() -> None:
    comm = Communicator(name="x", size=2, levels={"SendRecv": (Launches(9, 1, (0,)), Launches(5, 1, (1,)))})
    assert not comm.trouble
    more = Communicator(name="x", size=2, levels={"SendRecv": (Launches(9, 1, (0,)), Launches(6, 1, (1,)))})
    assert RasReport(communicators=(comm,)).progress != RasReport(communicators=(more,)).progress


def test_a_rank_that_calls_another_collective() -> None:
    everyone = (0, 1, 3)
    comm = Communicator(
        name="x",
        size=4,
        levels={
            "AllReduce": (Launches(64, 3, everyone), Launches(63, 1, (2,))),
            "AllGather": (Launches(11, 1, (2,)), Launches(10, 3, everyone)),
        },
    )
    assert find_culprits(comm) == {2: "launched AllGather #11 where 3 others launched AllReduce #64"}

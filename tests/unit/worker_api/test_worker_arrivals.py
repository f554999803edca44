"""When a worker entered its last collectives, from dumps that torch 2.13 wrote."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.agent.slow_rank_watch import count_from_first, read_group
from hpc_elastic.base import codec
from hpc_elastic.run.progress import NodeArrivals
from hpc_elastic.worker_api import flight_recorder
from hpc_elastic.worker_api.flight_recorder import read_arrivals

DATA = Path(__file__).parents[2] / "data" / "flight_recorder"


def entry(number: int, call: str = "nccl:all_reduce", *, group: str = "0", op: int = 0, p2p: bool = False) -> Any:
    return {
        "process_group": [group, "x"], "profiling_name": call, "collective_seq_id": number, "op_id": op or number,
        "is_p2p": p2p, "input_sizes": [[4]], "time_created_ns": number * 1000,
    }  # fmt: skip


def read(*entries: Any, config: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    return read_arrivals(json.dumps({"entries": entries, "pg_config": config or {}}))


def test_a_dump_of_gloo() -> None:
    group, never_0, never_3 = (
        read_arrivals((DATA / f"gloo_2.13_{name}").read_bytes())["0"] for name in ("other_0", "never_0", "never_3")
    )
    assert group["kinds"][:2] == ["gloo:all_reduce [[7]]", "gloo:all_reduce [[4, 5]]"]
    assert (group["first"], len(group["calls"]), group["transfers"]) == (1, 4, [])
    assert group["entered_ns"] == sorted(group["entered_ns"])
    assert (never_0["transfers"], never_3["transfers"]) == ([""], []), "it counts the sends that it does not record"


def test_nccl_records_who_sends_to_whom() -> None:
    held = read(
        entry(1), entry(1, "nccl:send 0->1", p2p=True), entry(2), config={"0": {"name": "0", "ranks": "[4, 6]"}}
    )
    assert held["0"]["transfers"] == ["nccl:send 0->1"]
    assert held["0"]["members"] == "[4, 6]"
    assert (held["0"]["first"], held["0"]["entered_ns"]) == (1, [1000, 2000])


def test_the_newest_are_kept_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(entry(1), entry(2), entry(4), entry(5))["0"]["first"] == 4
    together = read(entry(1), entry(2), entry(2, "nccl:coalesced"), entry(3))["0"]
    assert [together["kinds"][call] for call in together["calls"]] == [
        "nccl:all_reduce [[4]]", "nccl:coalesced [[4]]", "nccl:all_reduce [[4]]"
    ]  # fmt: skip
    monkeypatch.setattr(flight_recorder, "MOST_CALLS", 2)
    assert read(entry(1), entry(2), entry(3))["0"]["entered_ns"] == [2000, 3000]


def test_how_long_the_gpu_took_where_that_is_measured() -> None:
    timed = [entry(number) | {"duration_ms": 1.5} for number in (1, 2, 3)]
    running = read(*timed, entry(4))["0"]
    assert (running["took_us"], running["entered_ns"], running["calls"]) == ([1500] * 3, [1000, 2000, 3000], [0] * 3)
    assert read(entry(1), *timed[1:])["0"]["took_us"] == []
    assert read(entry(1), entry(2))["0"]["took_us"] == []
    assert read(entry(1), entry(2))["0"]["entered_ns"] == [1000, 2000]


def test_what_an_answer_costs() -> None:
    """The rank's thread at most 0.1 % of 30 s, for a ring of 2,000 entries; a node of 8 ranks 16 KB."""
    entries = [
        entry(number, f"nccl:{'abcd'[number % 4]}")
        | {"input_sizes": [[number % 50, 64]], "time_created_ns": 10**18 + number * 12_345_678}
        for number in range(5001, 7001)
    ]
    dump = json.dumps({"entries": entries})
    took = []
    for _ in range(5):  # on a busy machine a thread's time is longer, too
        began = time.thread_time()
        groups = read_arrivals(dump)
        took.append(time.thread_time() - began)
    assert min(took) < 0.03
    kinds: dict[str, int] = {}
    found = [read_group(rank, name, group, kinds) for rank in range(8) for name, group in groups.items()]
    written = NodeArrivals(round=0, since_ns=0, kinds=tuple(kinds), groups=count_from_first(found)[1])
    assert len(json.dumps(codec.to_json(written))) < 16e3

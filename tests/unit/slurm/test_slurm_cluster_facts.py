"""The site's settings and its nodes, as four versions print them."""

from __future__ import annotations

import time

import pytest

from hpc_elastic.slurm.client import SlurmConfig, parse_show_config, parse_sinfo_nodes
from tests.rigs.captures import VERSIONS, captured


@pytest.mark.parametrize("version", VERSIONS)
def test_config(version: str) -> None:
    config = parse_show_config(captured(version, "scontrol-show-config")[1])
    assert config == SlurmConfig(
        version=tuple(int(part) for part in version.split(".")),
        kill_wait=5,
        slurmd_timeout=20,
        job_requeue=True,
        cluster="rig",
        now=config.now,
    )
    assert config.now is not None
    assert time.strftime("%Y-%m-%dT%H", time.localtime(config.now)) in ("2026-11-21T01", "2026-11-21T02")
    assert config.version_text == version


def test_what_is_missing_or_unreadable_takes_slurms_default() -> None:
    config = parse_show_config("KillWait = soon\nJobRequeue = 0\nSlurmdTimeout = 0 sec\n")
    assert (config.kill_wait, config.job_requeue, config.slurmd_timeout) == (30, False, 0)
    assert (config.version, config.version_text) == ((), "")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "usable"), [("idle", 4), ("drained", 3)])
def test_nodes_of_partitions(version: str, name: str, usable: int) -> None:
    partitions = parse_sinfo_nodes(captured(version, f"sinfo-N-o-{name}")[1])
    assert {partition.name for partition in partitions} == {"main", "short", "lowr", "lowc", "high"}
    assert [partition.name for partition in partitions if partition.default] == ["main"]
    assert {(len(partition.names), len(partition.usable_names)) for partition in partitions} == {(4, usable)}


@pytest.mark.parametrize(
    ("version", "total", "usable"), [("20.11.4", 19, 13), ("24.11.5", 17, 12), ("26.05.5", 19, 13)]
)
def test_crashed_nodes_are_not_usable(version: str, total: int, usable: int) -> None:
    partitions = parse_sinfo_nodes(captured(version, "sinfo-N-o-crashed")[1])
    main = next(partition for partition in partitions if partition.default)
    assert (len(main.names), len(main.usable_names)) == (total, usable)
    (found,) = [part for part in partitions if part.name == "pA"]
    assert not found.default
    assert (len(found.names), len(found.usable_names)) == (4, 3)
    assert found.usable_names < found.names


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        ("idle", 1), ("mixed", 1), ("allocated", 1), ("planned", 1), ("idle~", 1), ("mixed-", 1), ("completing", 1),
        ("idle*", 0), ("down", 0), ("down*", 0), ("drained", 0), ("draining", 0), ("failing", 0), ("maint", 0),
    ],
)  # fmt: skip
def test_node_states(state: str, usable: int) -> None:
    (partition,) = parse_sinfo_nodes(f"n1|p|{state}|x|a reason | with bars\n")
    assert len(partition.usable_names) == usable


def test_foreign_lines_are_left_out() -> None:
    assert parse_sinfo_nodes("CLUSTER: a\n\n|||\nPARTITION AVAIL\n") == ()

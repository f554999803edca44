"""What a job of this account gets in its partition, in both outcomes, from what real Slurms printed."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from hpc_elastic.doctor.checks import DoctorFinding, Severity, SlurmFacts, check_allocation, seconds_of
from tests.rigs.captures import VERSIONS, captured

OK, WARNING, PROBLEM = Severity.OK, Severity.WARNING, Severity.PROBLEM

CONFIG = captured("22.05.8", "scontrol-show-config-cgroups")[1]
CONFIG = re.sub(r"(?m)^(AccountingStorageEnforce += )none$", r"\g<1>associations,limits,qos", CONFIG)
FACTS = SlurmFacts(
    config=CONFIG,
    partitions=captured("22.05.8", "scontrol-show-partition")[1],
    associations=captured("22.05.8", "sacctmgr-show-assoc")[1],
    qos_limits=captured("22.05.8", "sacctmgr-show-qos")[1],
    account="team",
    nodes=1,
)
"""Of a rig of two nodes with two GPUs each; but the partitions are those of another one, of four nodes."""
BY_QOS = CONFIG.replace("PreemptType             = preempt/none", "PreemptType             = preempt/qos")


def finding(check: str, facts: SlurmFacts) -> DoctorFinding:
    (found,) = [each for each in check_allocation(facts) if each.check == check]
    if found.level is not OK:
        assert found.means
        assert found.way_out
    return found


def test_an_account_with_room_has_no_problem() -> None:
    found = list(check_allocation(FACTS))
    assert {each.level for each in found} == {OK}
    assert [f"{each.check}: {each.found}" for each in found] == [
        "partition: main is UP",
        "partition.nodes: main gives a job at most 4 nodes",
        "partition.grace: PreemptMode=OFF, GraceTime=0 s",
        "slurm.limits: MaxSubmitJobs=10 in QOS small",
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_grace_of_each_recorded_slurm_s_partitions(version: str) -> None:
    facts = replace(
        FACTS,
        config=captured(version, "scontrol-show-config")[1],
        partitions=captured(version, "scontrol-show-partition")[1],
    )
    assert finding("partition.grace", replace(facts, partition="main")).found == "PreemptMode=OFF, GraceTime=0 s"
    low = replace(facts, partition="lowr", grace=5)
    assert finding("partition.grace", low).found == "PreemptMode=REQUEUE, GraceTime=10 s"
    short = finding("partition.grace", replace(low, grace=120))
    assert short.level is WARNING
    assert short.found == "PreemptMode=REQUEUE, GraceTime=10 s, less than --grace 120"
    assert "; its jobs end after 00:05:00" in finding("partition", replace(facts, partition="short")).found


@pytest.mark.parametrize(
    ("check", "changes", "level", "found"),
    [
        ("slurm.limits", {"nodes": 3}, PROBLEM, "a job of this account in QOS small has at most 1 node (MaxTRES)"),
        ("slurm.limits", {"nodes": 3, "qos": "one"}, PROBLEM, "a job of this account in QOS one has at most 2 nodes"),
        ("slurm.limits", {"qos": "one"}, WARNING, "MaxSubmitJobs=1 in QOS one"),
        ("slurm.limits", {"account": "other", "nodes": 9}, OK, ""),
        ("slurm.limits", {"associations": None}, OK, "not known"),
        (
            "slurm.limits",
            {"nodes": 3, "config": captured("22.05.8", "scontrol-show-config-cgroups")[1]},
            OK,
            "none is enforced (AccountingStorageEnforce=none)",
        ),
        ("partition.grace", {"config": BY_QOS, "qos": "one"}, OK, "QOS one: PreemptMode=requeue, GraceTime=10 s"),
        ("partition.grace", {"config": BY_QOS, "qos": "one", "grace": 60}, WARNING, "QOS one: PreemptMode=requeue"),
    ],
)
def test_each_in_the_other_outcome(check: str, changes: dict[str, object], level: Severity, found: str) -> None:
    seen = finding(check, replace(FACTS, **changes))  # type: ignore[arg-type]
    assert seen.level is level
    assert seen.found.startswith(found)


@pytest.mark.parametrize(
    ("text", "seconds"), [("10", 10), ("00:00:10", 10), ("1-02:03:04", 93784), ("", 0), ("UNLIMITED", 0)]
)
def test_times(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds

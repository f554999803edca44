"""Each check of `hpc-elastic doctor` in both outcomes, on what real Slurms printed and on facts of a host."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_elastic.doctor import host
from hpc_elastic.doctor.checks import (
    DoctorFinding,
    SavedFindings,
    Severity,
    SlurmFacts,
    ask_slurm,
    check_allocation,
    check_slurm,
    problem,
    save_findings,
    saved_notes,
    seconds_of,
)
from hpc_elastic.doctor.host import check_host, try_to_write
from hpc_elastic.errors import UsageError
from hpc_elastic.options.config_files import SITE_VARIABLE
from hpc_elastic.slurm.client import CommandResult
from tests.rigs.captures import VERSIONS, captured
from tests.rigs.fake_clock import FakeClock

OK, WARNING, PROBLEM = Severity.OK, Severity.WARNING, Severity.PROBLEM

PARTITION = (
    "PartitionName=main\n   AllowGroups=ALL Default=YES QoS=N/A\n   GraceTime=60 MaxNodes=UNLIMITED MaxTime=12:00:00\n"
    "   PreemptMode=REQUEUE State=UP TotalCPUs=16 TotalNodes=4\n"
)


def config(**changes: str) -> str:
    text = captured("22.05.8", "scontrol-show-config")[1]
    good = {
        "ProctrackType": "proctrack/cgroup", "TaskPlugin": "task/cgroup,task/affinity", "KillWait": "30 sec",
        "SlurmdTimeout": "300 sec", "JobRequeue": "1", "PreemptMode": "REQUEUE",
        "AccountingStorageEnforce": "associations,limits,qos",
    }  # fmt: skip
    for key, value in {**good, **changes}.items():
        text = re.sub(rf"(?m)^{key}(\s+)= .*$", rf"{key}\g<1>= {value}", text)
    memory = changes.get("ConstrainRAMSpace", "yes")
    return f"{text}\nCgroup Support Configuration:\nConstrainRAMSpace       = {memory}\n"


def facts(**changes: object) -> SlurmFacts:
    known: dict[str, object] = {"config": config(), "partitions": PARTITION, "nodes": 2}
    return SlurmFacts(**{**known, **changes})  # type: ignore[arg-type]


def level(found: list[DoctorFinding], check: str) -> Severity:
    (one,) = [finding for finding in found if finding.check == check]
    if one.level is not OK:
        assert one.means, "what it means for a run"
        assert one.way_out
    return one.level


def test_a_cluster_without_problems_has_none() -> None:
    found = list(check_slurm(facts()))
    assert [finding for finding in found if finding.level is not OK] == []
    assert len(found) == len({finding.check for finding in found}) >= 11


@pytest.mark.parametrize(
    ("check", "changes", "expected"),
    [
        ("slurm.controller", {"config_seconds": 9.0}, WARNING),
        ("slurm.controller", {"error": "Unable to contact slurm controller"}, PROBLEM),
        ("slurm.commands", {"is_missing": True}, WARNING),
        ("slurm.version", {"config": config(SLURM_VERSION="17.11.2")}, WARNING),
        ("slurm.requeue", {"config": config(JobRequeue="0")}, WARNING),
        ("slurm.kill-wait", {"config": config(KillWait="5 sec")}, WARNING),
        ("slurm.slurmd-timeout", {"config": config(SlurmdTimeout="3600 sec")}, WARNING),
        ("slurm.slurmd-timeout", {"config": config(SlurmdTimeout="0 sec")}, WARNING),
        ("slurm.proctrack", {"config": config(ProctrackType="proctrack/linuxproc")}, WARNING),
        ("slurm.proctrack", {"config": config(ProctrackType="proctrack/pgid")}, OK),
        ("slurm.memory", {"config": config(ConstrainRAMSpace="no")}, WARNING),
        ("slurm.memory", {"config": config(TaskPlugin="task/affinity")}, WARNING),
        ("slurm.preemption", {"config": config(PreemptMode="CANCEL", PreemptType="preempt/qos")}, WARNING),
        ("slurm.limits", {"associations": "|1|\n"}, WARNING),
        ("slurm.limits", {"associations": "4|100|\n"}, OK),
        ("partition", {"partition": "gone"}, PROBLEM),
        ("partition", {"partitions": PARTITION.replace("Default=YES", "Default=NO")}, PROBLEM),
        ("partition", {"partitions": PARTITION.replace("State=UP", "State=DOWN")}, PROBLEM),
        ("partition.nodes", {"nodes": 5}, PROBLEM),
        ("partition.nodes", {"nodes": 4}, OK),
        ("partition.nodes", {"partitions": PARTITION.replace("MaxNodes=UNLIMITED", "MaxNodes=1")}, PROBLEM),
        ("partition.grace", {"partitions": PARTITION.replace("GraceTime=60", "GraceTime=0")}, WARNING),
        ("partition.grace", {"partitions": PARTITION.replace("PreemptMode=REQUEUE", "PreemptMode=OFF")}, OK),
    ],
)
def test_each_property_of_slurm_in_its_other_outcome(
    check: str, changes: dict[str, object], expected: Severity
) -> None:
    assert level(list(check_slurm(facts(**changes))), check) is expected


@pytest.mark.parametrize("version", VERSIONS)
def test_each_recorded_slurm_is_read(version: str) -> None:
    found = list(check_slurm(facts(config=captured(version, "scontrol-show-config")[1])))
    assert level(found, "slurm.version") is OK
    assert level(found, "slurm.kill-wait") in (OK, WARNING)


def test_a_host_is_judged_for_one_node_and_for_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "not yet" / "runs"
    assert {one.level for one in check_host(runs, nodes=1)} == {OK}, "one node needs nothing shared"
    monkeypatch.setattr(host, "why_not_shared", lambda path: f"{path.parts[1]} is local to each node")
    found = list(check_host(runs, nodes=4))
    assert [(each.check, each.level) for each in found] == [
        ("files.space", OK), ("files.runs", PROBLEM), ("software.install", PROBLEM)
    ]  # fmt: skip
    assert found[1].found == f"{runs}: {runs.parts[1]} is local to each node"
    assert not (tmp_path / "not yet").exists()


class Slurm:
    """Answers, or does not."""

    def __init__(self, *, missing: tuple[str, ...] = (), silent: tuple[str, ...] = (), rc: int = 0) -> None:
        self._missing, self._silent, self._rc = missing, silent, rc

    def __call__(self, argv: list[str], *, timeout: float) -> CommandResult:
        if argv[0] in self._missing:
            raise FileNotFoundError(2, "No such file", argv[0])
        if argv[0] in self._silent:
            raise subprocess.TimeoutExpired(list(argv), timeout)
        texts = {("scontrol", "config"): config(), ("scontrol", "partition"): PARTITION}
        text = texts.get((argv[0], argv[-1]), "")
        return CommandResult(rc=self._rc, stdout="" if self._rc else text, stderr="no controller" if self._rc else "")


def asked(slurm: Slurm) -> SlurmFacts:
    return ask_slurm(SlurmFacts(nodes=2), runner=slurm, clock=FakeClock(), env={"USER": "ann"})  # type: ignore[arg-type]


def test_what_does_not_answer_is_a_fact_and_no_error() -> None:
    assert asked(Slurm()).partitions == PARTITION
    assert asked(Slurm(missing=("scontrol",))).is_missing
    assert "took more than" in asked(Slurm(silent=("scontrol",))).error
    assert asked(Slurm(rc=1)).error == "no controller"
    assert asked(Slurm(missing=("sacctmgr",))).associations is None
    assert asked(Slurm(silent=("sacctmgr",))).qos_limits is None


@pytest.mark.parametrize("for_site", [False, True])
def test_what_was_kept_is_used_for_each_run(tmp_path: Path, for_site: bool) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path / "xdg")}
    assert saved_notes(env) == []
    slurm = facts(partition="gone", config=config(JobRequeue="0", KillWait="40 sec"))
    kept = SavedFindings(saved_ns=1, findings=tuple(check_slurm(slurm)), slurm=slurm)
    path = save_findings(kept, env=env, for_site=for_site)
    assert path.stat().st_mode & 0o777 == (0o644 if for_site else 0o600)
    (note,) = saved_notes(env, partition="gone")
    assert note.startswith("partition: there is no partition gone; give --partition main (found on 1970-01-01)")
    notes = saved_notes(env, partition="main", nodes=5, shutdown_timeout=45.0, grace=120)
    assert [note.partition(";")[0] for note in notes] == [
        "partition: there is no partition gone",
        "slurm.kill-wait: KillWait=40 s, less than --shutdown-timeout 45",
        "partition.nodes: main gives a job at most 4 nodes",
        "partition.grace: PreemptMode=REQUEUE, GraceTime=60 s, less than --grace 120",
    ]
    path.write_text("{torn")
    assert saved_notes(env, partition="gone") == []
    unreachable = {**env, SITE_VARIABLE: f"/{'x' * 300}/config.toml"}
    assert saved_notes(unreachable, partition="gone") == []


def test_the_site_s_facts_and_the_account_s_are_shown_once(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "HPC_ELASTIC_SITE_CONFIG": str(tmp_path / "site" / "config.toml")}
    kept = SavedFindings(saved_ns=1, findings=tuple(check_slurm(facts(partition="gone"))))
    places = {save_findings(kept, env=env, for_site=for_site) for for_site in (False, True)}
    assert places == {tmp_path / "site" / "doctor.json", tmp_path / ".local/state/hpc_elastic/doctor/doctor.json"}
    assert len(saved_notes(env)) == 1
    own = [problem(check, "full", "nothing works", "ask") for check in ("files.runs", "slurm.limits", "gpu.errors")]
    slurm = facts(associations="|1|\n")
    save_findings(SavedFindings(saved_ns=1, findings=tuple(own), slurm=slurm), env=env, for_site=True)
    others = {**env, "HOME": str(tmp_path / "bob")}
    assert [note.partition(":")[0] for note in saved_notes(others)] == ["gpu.errors"], "the staff's own stays its own"
    with pytest.raises(UsageError, match="--save=site: HPC_ELASTIC_SITE_CONFIG and XDG_CONFIG_DIRS name no folder"):
        save_findings(kept, env={**env, "HPC_ELASTIC_SITE_CONFIG": ""}, for_site=True)


def test_what_is_measured_leaves_nothing(tmp_path: Path) -> None:
    assert not try_to_write(tmp_path).error
    assert try_to_write(tmp_path / "gone").error == "No such file or directory"
    assert list(tmp_path.iterdir()) == []


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

"""What a job of this account gets in its partition: nodes, time, notice, and how many jobs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from hpc_elastic.base.text import plural
from hpc_elastic.doctor.findings import Finding, ok, problem, problem_unless, warn_unless
from hpc_elastic.slurm.cluster_facts import config_fields

ASSOCIATION_FIELDS = ("MaxJobs", "MaxSubmitJobs", "GrpJobs", "MaxWall", "MaxTRES", "Account", "DefaultQOS", "QOS")
QOS_FIELDS = ("Name", "GraceTime", "PreemptMode", "MaxWall", "MaxTRES", "MaxJobsPU", "MaxSubmitJobsPU")
"""Of sacctmgr's ``format=``."""
Row = Mapping[str, str]


class SlurmFacts(Struct, frozen=True, kw_only=True):
    """What the commands printed."""

    config: str = ""
    """``scontrol show config``."""
    config_seconds: float = 0.0
    error: str = ""
    """Why there is no `config`."""
    is_missing: bool = False
    """There is no Slurm on this machine."""
    partitions: str = ""
    """``scontrol show partition``."""
    associations: str | None = None
    """``sacctmgr -nP show assoc`` with `ASSOCIATION_FIELDS`; None: it does not answer."""
    qos_limits: str | None = None
    """``sacctmgr -nP show qos`` with `QOS_FIELDS`; None: it does not answer."""
    partition: str = ""
    """That the run is for; empty: the default one."""
    nodes: int = 1
    """That the run is for."""
    account: str = ""
    """Of the run; empty: the user's default."""
    qos: str = ""
    """Of the run; empty: the account's default."""
    shutdown_timeout: float = 30.0
    """Seconds that its workers may take to end."""
    grace: int = 0
    """Seconds of notice that it wants for a last checkpoint; 0: not compared."""


def check_allocation(facts: SlurmFacts) -> Iterator[Finding]:
    """Judge. The order is that of the lines."""
    rows = [
        row
        for row in _rows(facts.associations or "", ASSOCIATION_FIELDS)
        if not facts.account or row.get("Account", facts.account) == facts.account
    ]
    every = {row["Name"]: row for row in _rows(facts.qos_limits or "", QOS_FIELDS)}
    qos = every.get(facts.qos or next((row["DefaultQOS"] for row in rows if row.get("DefaultQOS")), ""), {})
    yield from _partition(facts, qos)
    enforced = config_fields(facts.config).get("AccountingStorageEnforce", "").split(",")
    if facts.associations is None:
        yield ok("slurm.limits", "not known: sacctmgr does not answer")
    elif not {"limits", "safe", "all"} & set(enforced):
        yield ok("slurm.limits", f"none is enforced (AccountingStorageEnforce={','.join(enforced) or 'none'})")
    else:
        yield _limits(rows, qos, facts.nodes)


def _partition(facts: SlurmFacts, qos: Row) -> Iterator[Finding]:
    partitions = _partitions(facts.partitions)
    name = facts.partition or next((name for name, row in partitions.items() if row.get("Default") == "YES"), "")
    fields = partitions.get(name)
    if fields is None:
        yield problem(
            "partition", f"there is no {f'partition {name}' if name else 'default partition'}", "the job is refused",
            f"give --partition {' or '.join(partitions) or 'NAME'}",
        )  # fmt: skip
        return
    state, most = fields.get("State", "in no known state"), fields.get("MaxTime", "UNLIMITED")
    ends = "" if most == "UNLIMITED" else f"; its jobs end after {most}, and a run goes on by requeues"
    yield problem_unless(
        state == "UP", "partition", f"{name} is {state}{ends}", "jobs there do not begin",
        "another --partition, or wait",
    )  # fmt: skip
    limits = [fields.get("TotalNodes", ""), fields.get("MaxNodes", "")]
    limit = min([int(text) for text in limits if text.isdigit()], default=facts.nodes)
    yield problem_unless(
        facts.nodes <= limit, "partition.nodes", f"{name} gives a job at most {limit} nodes",
        f"a job with {facts.nodes} never begins", f"--nodes {limit}, or another --partition",
    )  # fmt: skip
    yield _grace(facts, fields, qos)


def _grace(facts: SlurmFacts, fields: Row, qos: Row) -> Finding:
    """How long a job has from its preemption to its end, by the setting that counts under the site's PreemptType."""
    config = config_fields(facts.config)
    by_qos = config.get("PreemptType", "").endswith("/qos") and bool(qos)
    where = f"QOS {qos['Name']}: " if by_qos else ""
    mode = (qos if by_qos else fields).get("PreemptMode", "OFF") or "OFF"
    if mode == "cluster":  # sacctmgr's word for: as the cluster has it
        mode = config.get("PreemptMode", "OFF")
    grace = seconds_of((qos if by_qos else fields).get("GraceTime", "0"))
    shown = f"{where}PreemptMode={mode}, GraceTime={grace} s"
    if mode.upper() in ("OFF", ""):
        return ok("partition.grace", shown)
    if not grace:
        shown += ": a preempted job ends without a notice"
    elif grace < facts.grace:
        shown += f", less than --grace {facts.grace}"
    return warn_unless(
        0 < grace >= facts.grace, "partition.grace", shown,
        "a last checkpoint that takes longer is lost when the job is preempted",
        "save often, or faster (asynchronously)",
    )  # fmt: skip


def _limits(rows: Sequence[Row], qos: Row, nodes: int) -> Finding:
    """How many jobs, how large and how long, by the account and its QOS."""
    # Which of several accounts it is for is not known here: the largest.
    most = min(
        max((_node_limit(row.get("MaxTRES", "")) for row in rows), default=math.inf),
        _node_limit(qos.get("MaxTRES", "")),
    )
    of = f" in QOS {qos['Name']}" if qos else ""
    if nodes > most:
        return problem(
            "slurm.limits", f"a job of this account{of} has at most {plural(int(most), 'node')} (MaxTRES)",
            f"a job with {nodes} is refused, or never begins",
            f"--nodes {int(most)}, or another --qos or --account",
        )  # fmt: skip
    submits = [_largest(rows, "MaxSubmitJobs"), _largest([qos], "MaxSubmitJobsPU")]
    submit = min((count for count in submits if count is not None), default=None)
    return warn_unless(
        submit is None or submit >= 2, "slurm.limits", f"MaxSubmitJobs={'none' if submit is None else submit}{of}",
        "a follow-on job would be refused while this one runs", "--requeue-with scontrol, where jobs may be requeued",
    )  # fmt: skip


def _largest(rows: Sequence[Row], name: str) -> int | None:
    return max((int(row[name]) for row in rows if row.get(name, "").isdigit()), default=None)


def _node_limit(tres: str) -> float:
    """Of ``cpu=8,node=2``."""
    found = dict(part.partition("=")[::2] for part in tres.split(","))
    return int(found["node"]) if found.get("node", "").isdigit() else math.inf


def _partitions(text: str) -> dict[str, dict[str, str]]:
    """The fields of each partition, of ``scontrol show partition``."""
    found: dict[str, dict[str, str]] = {}
    for block in text.split("PartitionName=")[1:]:
        words = block.split()
        found[words[0]] = dict(word.split("=", 1) for word in words[1:] if "=" in word)
    return found


def _rows(text: str, names: Sequence[str]) -> list[dict[str, str]]:
    """The lines of ``sacctmgr -nP``, by column."""
    return [dict(zip(names, line.split("|"), strict=False)) for line in text.splitlines() if line.strip()]


def seconds_of(text: str) -> int:
    """``10`` of scontrol, ``1-02:03:04`` of sacctmgr."""
    days, dash, clock = text.partition("-")
    total = 0
    for part in (clock if dash else text).split(":"):
        total = total * 60 + (int(part) if part.isdigit() else 0)
    return total + (int(days) * 86400 if dash and days.isdigit() else 0)

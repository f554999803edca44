"""What a job of this account gets in its partition: nodes, time, notice, GPUs, and how many jobs. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from hpc_elastic.base.text import plural
from hpc_elastic.doctor.findings import Finding, ok, problem, warn_unless, warning
from hpc_elastic.doctor.slurm_facts import (
    ASSOCIATION_FIELDS,
    QOS_FIELDS,
    SlurmFacts,
    parse_partitions,
    read_rows,
    seconds_of,
)
from hpc_elastic.slurm.cluster_facts import config_fields
from hpc_elastic.slurm.notation import names_text

_GPU = re.compile(r"\bgpu(?::[A-Za-z_][^:(,]*)?(?::(\d+))?")
"""``gpu:2``, ``gpu:a100:4(S:0-1)``, among others' GRES."""

Row = Mapping[str, str]


def check_allocation(facts: SlurmFacts) -> Iterator[Finding]:
    """Judge. The order is that of the lines."""
    rows = [
        row
        for row in read_rows(facts.associations or "", ASSOCIATION_FIELDS)
        if not facts.account or row.get("Account", facts.account) == facts.account
    ]
    every = {row["Name"]: row for row in read_rows(facts.qos_limits or "", QOS_FIELDS)}
    name = facts.qos or next((row["DefaultQOS"] for row in rows if row.get("DefaultQOS")), "")
    qos = every.get(name, {})
    yield from _partition(facts, qos)
    enforced = config_fields(facts.config).get("AccountingStorageEnforce", "").split(",")
    if facts.associations is None:
        yield ok("slurm.limits", "not known: sacctmgr does not answer")
    elif not {"limits", "safe", "all"} & set(enforced):
        yield ok("slurm.limits", f"none is enforced (AccountingStorageEnforce={','.join(enforced) or 'none'})")
    elif facts.qos and rows and not any(facts.qos in row.get("QOS", facts.qos).split(",") for row in rows):
        may = sorted({one for row in rows for one in row.get("QOS", "").split(",") if one})
        yield problem(
            "slurm.limits", f"this account may not use the QOS {facts.qos}", "the job is refused, or never begins",
            f"--qos {' or '.join(may)}" if may else "ask the site",
        )  # fmt: skip
    else:
        yield _limits(rows, qos, name, facts.nodes)


def _partition(facts: SlurmFacts, qos: Row) -> Iterator[Finding]:
    partitions = parse_partitions(facts.partitions)
    name = facts.partition or next((name for name, row in partitions.items() if row.get("Default") == "YES"), "")
    if not name:
        yield warning(
            "partition", "there is no default partition", "sbatch takes no job without one", "give --partition NAME"
        )  # fmt: skip
        return
    fields = partitions.get(name)
    if fields is None:
        yield problem(
            "partition", f"there is no partition {name}", "the job is refused",
            f"there are {', '.join(partitions) or 'none'}",
        )  # fmt: skip
        return
    if fields.get("State") != "UP":
        yield problem(
            "partition", f"{name} is {fields.get('State', 'in no known state')}", "jobs there do not begin",
            "another --partition, or wait",
        )  # fmt: skip
    else:
        yield ok("partition", f"{name} is up")
    limits = [fields.get("TotalNodes", ""), fields.get("MaxNodes", "")]
    limit = min([int(text) for text in limits if text.isdigit()], default=facts.nodes)
    if facts.nodes > limit:
        yield problem(
            "partition.nodes", f"{name} gives a job at most {limit} nodes", f"a job with {facts.nodes} never begins",
            f"--nodes {limit}, or another --partition",
        )  # fmt: skip
    else:
        yield ok("partition.nodes", f"{name} gives a job up to {limit} nodes")
    most = fields.get("MaxTime", "UNLIMITED")
    ends = "has no time limit" if most == "UNLIMITED" else f"ends jobs after {most}; a run goes on by requeues"
    yield ok("partition.time", f"{name} {ends}")
    yield _access(facts, name, fields)
    yield _grace(facts, fields, qos)
    yield _gpus(facts, name)


def _access(facts: SlurmFacts, name: str, fields: Row) -> Finding:
    """Does the partition take jobs of this account and QOS?"""
    wanted = (("--account", facts.account, "AllowAccounts"), ("--qos", facts.qos, "AllowQos"))
    for option, given, field in wanted:
        allowed = fields.get(field, "ALL")
        if given and allowed not in ("ALL", "(null)", "N/A") and given not in allowed.split(","):
            return problem(
                "partition.access", f"{name} takes jobs of {field}={allowed} alone, not of {given}",
                "sbatch refuses the job", f"{option} {allowed.replace(',', ' or ')}, or another --partition",
            )  # fmt: skip
    shown = ", ".join(f"{field}={fields.get(field, 'ALL')}" for _, _, field in wanted)
    return ok("partition.access", f"{name}: {shown}")


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
        return warning(
            "partition.grace", shown, "a preempted job ends without a notice",
            "save often: the run goes on from the last checkpoint",
        )  # fmt: skip
    less = f", less than --grace {facts.grace}" if grace < facts.grace else ""
    return warn_unless(
        not less, "partition.grace", shown + less,
        "a last checkpoint that takes longer is lost when the job is preempted",
        "save often, or faster (asynchronously)",
    )  # fmt: skip


def _gpus(facts: SlurmFacts, name: str) -> Finding:
    """How many GPUs the nodes have, and whether a job sees its own alone."""
    counts: dict[int, list[str]] = {}
    for line in dict.fromkeys(facts.gres.splitlines()):
        node, _, rest = line.partition("|")
        partition, _, gres = rest.partition("|")
        if partition.rstrip("*") == name:
            counts.setdefault(sum(int(count or 1) for count in _GPU.findall(gres)), []).append(node)
    if not any(counts):
        return ok("partition.gpus", f"{name} has none")
    each = ", ".join(f"{plural(count, 'GPU')} on {names_text(nodes)}" for count, nodes in sorted(counts.items()))
    if len(counts) > 1:
        return warning(
            "partition.gpus", each, "the number of workers differs between nodes, or some nodes are never given",
            f"--gpus-per-node {min(count for count in counts if count)}, or --constraint for one kind of node",
        )  # fmt: skip
    fields = config_fields(facts.config)
    is_confined = fields.get("ConstrainDevices", "").lower() == "yes" and "cgroup" in fields.get("TaskPlugin", "")
    sees = "a job sees its own alone" if is_confined else "devices are not confined (ConstrainDevices)"
    return warn_unless(
        is_confined, "partition.gpus", f"{each}; {sees}",
        "processes of other jobs on the node can use this job's GPUs", "--exclusive",
    )  # fmt: skip


def _limits(rows: Sequence[Row], qos: Row, qos_name: str, nodes: int) -> Finding:
    """How many jobs, how large and how long, by the account and its QOS."""
    of_qos = _node_limit(qos.get("MaxTRES", ""))
    # Which of several accounts it is for is not known here: the largest.
    most = min(max((_node_limit(row.get("MaxTRES", "")) for row in rows), default=math.inf), of_qos)
    if nodes > most:
        return problem(
            "slurm.limits", f"a job of this account{f' in QOS {qos_name}' if qos else ''} has at most "
            f"{plural(int(most), 'node')} (MaxTRES)", f"a job with {nodes} is refused, or never begins",
            f"--nodes {int(most)}, or another --qos or --account",
        )  # fmt: skip
    each = [_largest(rows, "MaxSubmitJobs"), _largest([qos], "MaxSubmitJobsPU")]
    submit = min((count for count in each if count is not None), default=None)
    if submit is not None and submit < 2:
        return warning(
            "slurm.limits", f"MaxSubmitJobs={submit}", "a follow-on job would be refused while this one runs",
            "--requeue-with scontrol, where jobs may be requeued",
        )  # fmt: skip
    limits = [("MaxJobs", _largest(rows, "MaxJobs")), ("MaxSubmitJobs", submit), ("MaxJobsPU", qos.get("MaxJobsPU"))]
    running = [f"{name}={value}" for name, value in limits if value not in (None, "")]
    walls = dict.fromkeys(row["MaxWall"] for row in (*rows, qos) if row.get("MaxWall"))
    running += [f"MaxWall={' and '.join(walls)}, a run goes on by requeues"] if walls else []
    of = f" (QOS {qos_name})" if qos else ""
    return ok("slurm.limits", ", ".join(running) + of if running else f"no limits on jobs of this account{of}")


def _largest(rows: Sequence[Row], name: str) -> int | None:
    return max((int(row[name]) for row in rows if row.get(name, "").isdigit()), default=None)


def _node_limit(tres: str) -> float:
    """Of ``cpu=8,node=2``."""
    found = dict(part.partition("=")[::2] for part in tres.split(","))
    return int(found["node"]) if found.get("node", "").isdigit() else math.inf

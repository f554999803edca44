"""What a check finds, with the way out; and the checks of a site's Slurm: its settings, and what this account gets.

A person keeps the findings for later submissions, which judge the facts of Slurm again.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.clock import Clock
from hpc_elastic.base.files import Unreadable
from hpc_elastic.base.text import first_of, plural
from hpc_elastic.errors import UsageError
from hpc_elastic.options import config_files
from hpc_elastic.options.config_files import SITE_VARIABLE
from hpc_elastic.run.index import account_folder, make_account_folder
from hpc_elastic.slurm.client import CommandRunner, config_fields, parse_show_config
from hpc_elastic.slurm.job_environment import names_text


class Severity(str, Enum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class DoctorFinding(Struct, frozen=True, kw_only=True):
    check: str
    level: Severity
    found: str
    means: str = ""
    way_out: str = ""


def ok(check: str, found: str) -> DoctorFinding:
    return DoctorFinding(check=check, level=Severity.OK, found=found)


def warning(check: str, found: str, means: str, way_out: str) -> DoctorFinding:
    return DoctorFinding(check=check, level=Severity.WARNING, found=found, means=means, way_out=way_out)


def problem(check: str, found: str, means: str, way_out: str) -> DoctorFinding:
    return DoctorFinding(check=check, level=Severity.PROBLEM, found=found, means=means, way_out=way_out)


def warn_unless(is_fine: bool, check: str, found: str, means: str, way_out: str) -> DoctorFinding:
    return ok(check, found) if is_fine else warning(check, found, means, way_out)


def problem_unless(is_fine: bool, check: str, found: str, means: str, way_out: str) -> DoctorFinding:
    return ok(check, found) if is_fine else problem(check, found, means, way_out)


def fold(found: Sequence[tuple[str, DoctorFinding]]) -> list[DoctorFinding]:
    lines: dict[tuple[str, Severity, str], list[tuple[str, DoctorFinding]]] = {}
    for node, finding in found:
        lines.setdefault((finding.check, finding.level, finding.means), []).append((node, finding))
    folded = []
    for same in lines.values():
        texts = first_of(list(dict.fromkeys(finding.found for _, finding in same)), 2)
        folded.append(replace(same[0][1], found=f"{names_text([node for node, _ in same])}: {texts}"))
    return folded


_TESTED = ((20, 11), (26, 5))
"""The oldest and the newest version that this project's tests run with."""
_ANSWER_SECONDS = 60.0
_ASSOCIATION_FIELDS = ("MaxJobs", "MaxSubmitJobs", "GrpJobs", "MaxWall", "MaxTRES", "Account", "DefaultQOS", "QOS")
_QOS_FIELDS = ("Name", "GraceTime", "PreemptMode", "MaxWall", "MaxTRES", "MaxJobsPU", "MaxSubmitJobsPU")
Row = Mapping[str, str]


class SlurmFacts(Struct, frozen=True, kw_only=True):
    """The output of Slurm's commands, and what the run asks for."""

    config: str = ""
    """``scontrol show config``; empty: see `error`."""
    config_seconds: float = 0.0
    error: str = ""
    is_missing: bool = False
    partitions: str = ""
    """``scontrol show partition``."""
    associations: str | None = None
    """``sacctmgr -nP show assoc``; None: it does not answer."""
    qos_limits: str | None = None
    """``sacctmgr -nP show qos``, likewise."""
    partition: str = ""
    """The run's; empty: the default one."""
    nodes: int = 1
    account: str = ""
    """The run's; empty: the user's default."""
    qos: str = ""
    """The run's; empty: the account's default."""
    shutdown_timeout: float = 30.0
    grace: int = 0
    """Seconds of notice that the run wants for a last checkpoint; 0: not compared."""


def ask_slurm(run: SlurmFacts, *, runner: CommandRunner, clock: Clock, env: Mapping[str, str]) -> SlurmFacts:
    """Run Slurm's commands, which change nothing, and add their output to what the run asks for."""
    began = clock.monotonic()
    try:
        config = runner(["scontrol", "show", "config"], timeout=_ANSWER_SECONDS)
    except (FileNotFoundError, PermissionError):
        return SlurmFacts(is_missing=True)
    except subprocess.TimeoutExpired:
        return SlurmFacts(error=f"scontrol show config took more than {_ANSWER_SECONDS:g} s")
    seconds = clock.monotonic() - began
    if config.rc != 0:
        return SlurmFacts(error=" ".join((config.stderr or config.stdout).split()))

    def ask(*argv: str) -> str | None:
        try:
            done = runner(list(argv), timeout=20.0)
        except (FileNotFoundError, PermissionError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.rc == 0 else None

    user = env.get("USER") or str(os.getuid())
    limits = f"format={','.join(_ASSOCIATION_FIELDS)}"
    return replace(
        run,
        config=config.stdout,
        config_seconds=seconds,
        partitions=ask("scontrol", "show", "partition") or "",
        associations=ask("sacctmgr", "-nP", "show", "assoc", f"user={user}", limits),
        qos_limits=ask("sacctmgr", "-nP", "show", "qos", f"format={','.join(_QOS_FIELDS)}"),
    )


def check_slurm(facts: SlurmFacts) -> Iterator[DoctorFinding]:
    if facts.is_missing:
        yield warning(
            "slurm.commands", "no Slurm on this machine", "runs are executed here",
            "submit from a login node of a cluster",
        )  # fmt: skip
        return
    if facts.error:
        yield problem(
            "slurm.controller", f"no answer: {facts.error}", "nothing can be submitted, and no requeue be asked for",
            "wait, or ask the site (scontrol ping)",
        )  # fmt: skip
        return
    yield warn_unless(
        facts.config_seconds <= 5.0, "slurm.controller", f"answers in {facts.config_seconds:.1f} s",
        "starts, status and requeues wait for it", "ask it less often: hpc-elastic status --no-slurm",
    )  # fmt: skip
    yield from _settings(facts)
    yield from check_allocation(facts)


def _settings(facts: SlurmFacts) -> Iterator[DoctorFinding]:
    fields, config = config_fields(facts.config), parse_show_config(facts.config)
    yield warn_unless(
        bool(config.version) and _TESTED[0] <= config.version[:2] <= _TESTED[1], "slurm.version",
        config.version_text or "not known", "this project is tested with 20.11 to 26.05",
        "rehearse a short run there before a long one",
    )  # fmt: skip
    yield warn_unless(
        config.job_requeue, "slurm.requeue", f"JobRequeue={int(config.job_requeue)}",
        "a job may not begin again: a run goes on by follow-on jobs",
        "nothing needs to be done; --requeue where the site allows it for a job, --requeue-with chain always",
    )  # fmt: skip
    is_long = config.kill_wait >= facts.shutdown_timeout
    less = "" if is_long else f", less than --shutdown-timeout {facts.shutdown_timeout:g}"
    yield warn_unless(
        is_long, "slurm.kill-wait", f"KillWait={config.kill_wait} s{less}",
        "workers have no more than that from SIGTERM to SIGKILL when Slurm itself ends the job",
        f"--shutdown-timeout {max(1, config.kill_wait - 2)}, and save at the notice (--grace), not at SIGTERM",
    )  # fmt: skip
    yield warn_unless(
        0 < config.slurmd_timeout < 600, "slurm.slurmd-timeout",
        f"SlurmdTimeout={config.slurmd_timeout} s{'' if config.slurmd_timeout else ' (never)'}",
        "a dead node is given up late, and a requeued job waits for that; the run itself notices it in seconds",
        "--spares 1, or a range as --nodes 3-4, so that the run goes on in the same job",
    )  # fmt: skip
    track, plugins = fields.get("ProctrackType", ""), fields.get("TaskPlugin", "")
    yield warn_unless(
        track != "proctrack/linuxproc", "slurm.proctrack", f"ProctrackType={track or 'not known'}",
        "Slurm's SIGTERM at a preemption reaches every process of the job: a worker that does not handle it dies",
        "handle SIGTERM in the script, or rely on the last checkpoint",
    )  # fmt: skip
    limit = fields.get("ConstrainRAMSpace", "")
    yield warn_unless(
        "cgroup" in plugins and limit.lower() == "yes", "slurm.memory",
        f"TaskPlugin={plugins or 'none'}, ConstrainRAMSpace={limit or 'no'}",
        "a worker that takes too much is killed by the node's own OOM killer, if at all, and may take the agent or "
        "another job with it", "--mem with what the workers need; --health-checks memory=SIZE",
    )  # fmt: skip
    kind, mode = fields.get("PreemptType", "").removeprefix("preempt/"), fields.get("PreemptMode", "")
    yield warn_unless(
        kind in ("", "none") or "CANCEL" not in mode, "slurm.preemption",
        f"PreemptType={kind or 'none'}, PreemptMode={mode or 'OFF'}",
        "a preempted job ends, and does not come back by itself",
        "nothing needs to be done where there is a GraceTime: the run requeues itself in it",
    )  # fmt: skip


def check_allocation(facts: SlurmFacts) -> Iterator[DoctorFinding]:
    rows = [
        row
        for row in _rows(facts.associations or "", _ASSOCIATION_FIELDS)
        if not facts.account or row.get("Account", facts.account) == facts.account
    ]
    every = {row["Name"]: row for row in _rows(facts.qos_limits or "", _QOS_FIELDS)}
    qos = every.get(facts.qos or next((row["DefaultQOS"] for row in rows if row.get("DefaultQOS")), ""), {})
    yield from _partition(facts, qos)
    enforced = config_fields(facts.config).get("AccountingStorageEnforce", "").split(",")
    if facts.associations is None:
        yield ok("slurm.limits", "not known: sacctmgr does not answer")
    elif not {"limits", "safe", "all"} & set(enforced):
        yield ok("slurm.limits", f"none is enforced (AccountingStorageEnforce={','.join(enforced) or 'none'})")
    else:
        yield _limits(rows, qos, facts.nodes)


def _partition(facts: SlurmFacts, qos: Row) -> Iterator[DoctorFinding]:
    partitions: dict[str, Row] = {}
    for block in facts.partitions.split("PartitionName=")[1:]:
        words = block.split()
        partitions[words[0]] = dict(word.split("=", 1) for word in words[1:] if "=" in word)
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


def _grace(facts: SlurmFacts, fields: Row, qos: Row) -> DoctorFinding:
    """Judge the time from a job's preemption to its end, by the setting that counts under the site's PreemptType."""
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


def _limits(rows: Sequence[Row], qos: Row, nodes: int) -> DoctorFinding:
    # Which of several accounts the job is for is unknown here: the largest counts.
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
    found = dict(part.partition("=")[::2] for part in tres.split(","))
    return int(found["node"]) if found.get("node", "").isdigit() else math.inf


def _rows(text: str, names: Sequence[str]) -> list[dict[str, str]]:
    return [dict(zip(names, line.split("|"), strict=False)) for line in text.splitlines() if line.strip()]


def seconds_of(text: str) -> int:
    """Seconds of scontrol's ``10``, or sacctmgr's ``1-02:03:04``."""
    days, dash, clock = text.partition("-")
    total = 0
    for part in (clock if dash else text).split(":"):
        total = total * 60 + (int(part) if part.isdigit() else 0)
    return total + (int(days) * 86400 if dash and days.isdigit() else 0)


class SavedFindings(Struct, frozen=True, kw_only=True):
    saved_ns: int
    findings: tuple[DoctorFinding, ...] = ()
    slurm: SlurmFacts | None = None
    """The facts behind them, which are judged again for each run that is submitted."""


_NAME = "doctor.json"
# All of these but slurm.limits, which are the account's.
_OF_THE_SITE = ("slurm.", "partition", "gpu.", "network.", "nodes.memory", "nodes.signals", "nodes.shm")


def save_findings(kept: SavedFindings, *, env: Mapping[str, str], for_site: bool = False) -> Path:
    """Raises UsageError or OSError: there is no such folder, or it refuses."""
    if not for_site:
        path = make_account_folder("doctor", env) / _NAME
        codec.save(path, kept)
        return path
    site = _site_file(env)
    if site is None:
        raise UsageError(f"--save=site: {SITE_VARIABLE} and XDG_CONFIG_DIRS name no folder; use --save")
    found = (each for each in kept.findings if each.check.startswith(_OF_THE_SITE) and each.check != "slurm.limits")
    slurm = replace(kept.slurm, associations=None, qos_limits=None) if kept.slurm is not None else None
    site.parent.mkdir(parents=True, exist_ok=True)
    codec.save(site, replace(kept, findings=tuple(found), slurm=slurm))
    site.chmod(0o644)
    return site


def _site_file(env: Mapping[str, str]) -> Path | None:
    found = [each.path for each in config_files.candidates(env, Path("/")) if each.layer is config_files.Layer.SITE]
    return found[0].parent / _NAME if found else None


def saved_notes(env: Mapping[str, str], **run: Any) -> list[str]:
    """The site's problems come first, then this account's, then new ones for a run with these fields."""
    notes: dict[str, str] = {}
    folder = account_folder("doctor", env)
    for path in (_site_file(env), folder and folder / _NAME):
        saved = codec.load(path, SavedFindings) if path is not None else None
        if saved is None or isinstance(saved, Unreadable):
            continue
        day = time.strftime("%Y-%m-%d", time.localtime(saved.saved_ns / 1e9))
        judged = check_slurm(replace(saved.slurm, **run)) if saved.slurm is not None else ()
        new = [each for each in judged if each.level is not Severity.OK and each not in saved.findings]
        problems = [each for each in saved.findings if each.level is Severity.PROBLEM]
        for each in (*problems, *new):
            notes.setdefault(f"{each.check}: {each.found}; {each.way_out}", f" (found on {day})")
    return [note + day for note, day in notes.items()]

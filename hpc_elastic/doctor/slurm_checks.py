"""What a site's Slurm means for a run, from what its commands print."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from hpc_elastic.base.clock import Clock
from hpc_elastic.doctor.allocation_checks import ASSOCIATION_FIELDS, QOS_FIELDS, SlurmFacts, check_allocation
from hpc_elastic.doctor.findings import Finding, problem, warn_unless, warning
from hpc_elastic.slurm.client import CommandRunner
from hpc_elastic.slurm.cluster_facts import config_fields, parse_show_config

_TESTED = ((20, 11), (26, 5))
"""The oldest and the newest version that this project's tests run with."""
_SLOW_SECONDS = 5.0
_LONG_SILENCE = 600
_ANSWER_SECONDS = 60.0
_MORE_SECONDS = 20.0


def ask_slurm(run: SlurmFacts, *, runner: CommandRunner, clock: Clock, env: Mapping[str, str]) -> SlurmFacts:
    """What Slurm's commands print; nothing is changed. `run` says what the run asks for."""
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
            done = runner(list(argv), timeout=_MORE_SECONDS)
        except (FileNotFoundError, PermissionError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.rc == 0 else None

    user = env.get("USER") or str(os.getuid())
    limits = f"format={','.join(ASSOCIATION_FIELDS)}"
    return replace(
        run,
        config=config.stdout,
        config_seconds=seconds,
        partitions=ask("scontrol", "show", "partition") or "",
        associations=ask("sacctmgr", "-nP", "show", "assoc", f"user={user}", limits),
        qos_limits=ask("sacctmgr", "-nP", "show", "qos", f"format={','.join(QOS_FIELDS)}"),
    )


def check_slurm(facts: SlurmFacts) -> Iterator[Finding]:
    """Judge. Pure; the order is that of the lines."""
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
        facts.config_seconds <= _SLOW_SECONDS, "slurm.controller", f"answers in {facts.config_seconds:.1f} s",
        "starts, status and requeues wait for it", "ask it less often: hpc-elastic status --no-slurm",
    )  # fmt: skip
    yield from _settings(facts)
    yield from check_allocation(facts)


def _settings(facts: SlurmFacts) -> Iterator[Finding]:
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
        0 < config.slurmd_timeout < _LONG_SILENCE, "slurm.slurmd-timeout",
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

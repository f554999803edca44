"""What a site's Slurm means for a run, from what its commands print. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpc_elastic.doctor.allocation_checks import check_allocation
from hpc_elastic.doctor.findings import Finding, ok, problem, warn_unless, warning
from hpc_elastic.doctor.slurm_facts import SlurmFacts
from hpc_elastic.slurm.cluster_facts import SlurmConfig, config_fields, parse_show_config

_TESTED = ((20, 11), (26, 5))
"""The oldest and the newest version that this project's tests run with."""
_SLOW_SECONDS = 5.0
_LONG_SILENCE = 600
_SHORT_MEMORY = 60
_NONE = ("", "(null)", "none", "N/A")


def check_slurm(facts: SlurmFacts) -> Iterator[Finding]:
    """Judge. The order is that of the lines."""
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
    fields, config = config_fields(facts.config), parse_show_config(facts.config)
    yield warn_unless(
        facts.config_seconds <= _SLOW_SECONDS, "slurm.controller", f"answers in {facts.config_seconds:.1f} s",
        "starts, status and requeues wait for it", "ask it less often: hpc-elastic status --no-slurm",
    )  # fmt: skip
    yield from _settings(config, facts.shutdown_timeout)
    yield from _processes(fields)
    yield from _services(fields, facts)
    yield from check_allocation(facts)


def _settings(config: SlurmConfig, shutdown_timeout: float) -> Iterator[Finding]:
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
    is_long = config.kill_wait >= shutdown_timeout
    less = "" if is_long else f", less than --shutdown-timeout {shutdown_timeout:g}"
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
    yield warn_unless(
        config.min_job_age >= _SHORT_MEMORY, "slurm.job-age", f"MinJobAge={config.min_job_age} s",
        "Slurm forgets ended jobs at once", "read a run's end with hpc-elastic report, which needs no Slurm",
    )  # fmt: skip


def _processes(fields: Mapping[str, str]) -> Iterator[Finding]:
    track = fields.get("ProctrackType", "").removeprefix("proctrack/")
    if track == "linuxproc":
        yield warning(
            "slurm.proctrack", "ProctrackType=linuxproc",
            "Slurm's SIGTERM at a preemption reaches every process of the job: a worker that does not handle it dies",
            "handle SIGTERM in the script, or rely on the last checkpoint",
        )  # fmt: skip
    else:
        yield warn_unless(
            track == "cgroup", "slurm.proctrack", f"ProctrackType={track or 'not known'}",
            "processes that leave their group are not known to Slurm as the job's",
            "nothing needs to be done: agents find and end what workers leave",
        )  # fmt: skip
    plugins = fields.get("TaskPlugin", "")
    yield warn_unless(
        "cgroup" in plugins or "affinity" in plugins, "slurm.task-plugin", f"TaskPlugin={plugins or 'none'}",
        "jobs on one node share its CPUs without bounds", "--exclusive, and OMP_NUM_THREADS in the job's environment",
    )  # fmt: skip
    limit = fields.get("ConstrainRAMSpace", "")
    yield warn_unless(
        "cgroup" in plugins and limit.lower() == "yes", "slurm.memory",
        f"TaskPlugin={plugins or 'none'}, ConstrainRAMSpace={limit or 'no'}",
        "a worker that takes too much is killed by the node's own OOM killer, if at all, and may take the agent or "
        "another job with it", "--mem with what the workers need; --health-checks memory=SIZE",
    )  # fmt: skip
    flags = fields.get("PrologFlags", "")
    yield warn_unless(
        fields.get("Prolog", fields.get("Prolog[0]", "")) in _NONE or "Alloc" in flags or "Contain" in flags,
        "slurm.prolog", f"PrologFlags={flags or 'none'}",
        "the site's prolog runs when the agents are started: they come late",
        "--rdzv-conf timeout=SECONDS above what the prolog takes",
    )  # fmt: skip


def _services(fields: Mapping[str, str], facts: SlurmFacts) -> Iterator[Finding]:
    kind, mode = fields.get("PreemptType", "").removeprefix("preempt/"), fields.get("PreemptMode", "")
    yield warn_unless(
        kind in ("", "none") or "CANCEL" not in mode, "slurm.preemption",
        f"PreemptType={kind or 'none'}, PreemptMode={mode or 'OFF'}",
        "a preempted job ends, and does not come back by itself",
        "nothing needs to be done where there is a GraceTime: the run requeues itself in it",
    )  # fmt: skip
    # Slurm does not show whether a job has --no-kill: what may take it away is all that can be seen.
    plugins = [f"{name}={fields[name]}" for name in ("JobSubmitPlugins", "CliFilterPlugins") if _has(fields, name)]
    yield warn_unless(
        not plugins, "slurm.no-kill",
        f"{', '.join(plugins)}: may change a job's options, --no-kill among them" if plugins
        else "--no-kill is given with each job, and no plugin changes options",
        "without it a node's loss ends the job, and the run goes on by a requeue",
        "ask the site what the plugin changes",
    )  # fmt: skip
    program = fields.get("MailProg", "") if _has(fields, "MailProg") else "none"
    yield warn_unless(
        program != "none" and facts.mail_program_exists, "slurm.mail",
        f"MailProg={program}{'' if facts.mail_program_exists else ' is not on this host'}",
        "--mail-type may send nothing", "ask the site, or look at hpc-elastic list",
    )  # fmt: skip
    storage = fields.get("AccountingStorageType", "").removeprefix("accounting_storage/")
    if storage in _NONE or facts.accounting_error:
        yield warning(
            "slurm.accounting", facts.accounting_error or "there is none", "what became of a job that Slurm has "
            "forgotten is known by the run's own files alone", "nothing needs to be done",
        )  # fmt: skip
    else:
        yield ok("slurm.accounting", f"sacct answers ({storage})")


def _has(fields: Mapping[str, str], name: str) -> bool:
    return fields.get(name, "") not in _NONE

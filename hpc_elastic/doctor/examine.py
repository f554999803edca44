"""Asks Slurm's commands and this host; what they say goes to the checks."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

import hpc_elastic
from hpc_elastic.base.clock import Clock
from hpc_elastic.base.host_facts import filesystem_type
from hpc_elastic.doctor import host_checks
from hpc_elastic.doctor.findings import Finding
from hpc_elastic.doctor.slurm_checks import check_slurm
from hpc_elastic.doctor.slurm_facts import ASSOCIATION_FIELDS, QOS_FIELDS, SlurmFacts
from hpc_elastic.doctor.software_probe import PythonFacts, look_at_python
from hpc_elastic.launch.run_directory import why_not_shared
from hpc_elastic.run.container import Container, Runtime
from hpc_elastic.slurm.client import CommandRunner, CommandTimeoutError
from hpc_elastic.slurm.cluster_facts import config_fields

_ANSWER_SECONDS = 60.0
_MORE_SECONDS = 20.0


class Asked(Struct, frozen=True, kw_only=True):
    """The run that the checks are for."""

    runs_dir: Path
    partition: str
    nodes: int
    python: str
    account: str = ""
    qos: str = ""
    shutdown_timeout: float = 30.0
    """Seconds that workers may take to end."""
    grace: int = 0
    """Seconds of notice that are wanted for a last checkpoint; 0: not compared."""
    container: Container | None = None


def examine(asked: Asked, slurm: SlurmFacts, *, runner: CommandRunner, env: Mapping[str, str]) -> list[Finding]:
    """All findings, in the order of their lines."""
    container = asked.container
    by_srun = container is not None and container.image.runtime is Runtime.PYXIS
    python = look_at_python(asked.python, env, cwd=os.getcwd(), container=container) if not by_srun else PythonFacts()
    nodes = 1 if slurm.is_missing else asked.nodes
    host = list(host_checks.check_host(look_at_host(asked, python, env), nodes=nodes))
    if container is None:
        return [*check_slurm(slurm), *host]
    srun_help, why = _ask(runner, "srun", "--help") if by_srun else ("", "")
    inside = host_checks.judge_container(container, python, srun_help=srun_help, srun_error=why)
    return [*check_slurm(slurm), *(each for each in host if each.check != "software.torch"), inside]


def ask_slurm(asked: Asked, *, runner: CommandRunner, clock: Clock, env: Mapping[str, str]) -> SlurmFacts:
    """What Slurm's commands print; nothing is changed."""
    began = clock.monotonic()
    try:
        config = runner(["scontrol", "show", "config"], timeout=_ANSWER_SECONDS)
    except (FileNotFoundError, PermissionError):
        return SlurmFacts(is_missing=True)
    except CommandTimeoutError:
        return SlurmFacts(error=f"scontrol show config took more than {_ANSWER_SECONDS:g} s")
    seconds = clock.monotonic() - began
    if config.rc != 0:
        return SlurmFacts(error=" ".join((config.stderr or config.stdout).split()))
    partitions, _ = _ask(runner, "scontrol", "show", "partition")
    user = env.get("USER") or str(os.getuid())
    limits = f"format={','.join(ASSOCIATION_FIELDS)}"
    associations, _ = _ask(runner, "sacctmgr", "-nP", "show", "assoc", f"user={user}", limits)
    qos_limits, _ = _ask(runner, "sacctmgr", "-nP", "show", "qos", f"format={','.join(QOS_FIELDS)}")
    gres, _ = _ask(runner, "sinfo", "-N", "-h", "-o", "%N|%P|%G")
    _, accounting_error = _ask(runner, "sacct", "-X", "-n", "-P", "-o", "JobID", "-S", "now-1minutes")
    mail = config_fields(config.stdout).get("MailProg", "")
    return SlurmFacts(
        config=config.stdout,
        config_seconds=seconds,
        partitions=partitions or "",
        associations=associations,
        qos_limits=qos_limits,
        gres=gres or "",
        accounting_error=accounting_error,
        mail_program_exists=not mail.startswith("/") or os.access(mail, os.X_OK),
        partition=asked.partition,
        nodes=asked.nodes,
        account=asked.account,
        qos=asked.qos,
        shutdown_timeout=asked.shutdown_timeout,
        grace=asked.grace,
    )


def _ask(runner: CommandRunner, *argv: str) -> tuple[str | None, str]:
    """What a command printed; or None, and why."""
    try:
        done = runner(list(argv), timeout=_MORE_SECONDS)
    except (FileNotFoundError, PermissionError):
        return None, f"{argv[0]} is not on PATH"
    except CommandTimeoutError:
        return None, f"{argv[0]} did not answer in {_MORE_SECONDS:g} s"
    return (done.stdout, "") if done.rc == 0 else (None, " ".join((done.stderr or done.stdout).split()))


def look_at_host(asked: Asked, python: PythonFacts, env: Mapping[str, str]) -> host_checks.HostFacts:
    """What this host shows."""
    package = Path(hpc_elastic.__file__).resolve().parent
    place = next(path for path in (asked.runs_dir, *asked.runs_dir.parents) if path.is_dir())
    host = socket.gethostname()
    return host_checks.HostFacts(
        runs_dir=str(asked.runs_dir),
        runs_room=replace(host_checks.try_to_write(place), path=str(asked.runs_dir)),
        quotas=host_checks.ask_quotas(place, filesystem_type(os.path.realpath(place)) or ""),
        why_not_shared=why_not_shared(asked.runs_dir) or "",
        file_seconds=host_checks.measure_files(place),
        folders=host_checks.measure_folders(env),
        host=host,
        address=host_checks.resolve(host),
        package=str(package),
        package_not_shared=why_not_shared(package) or "",
        python=f"{platform.python_version()} ({sys.executable})",
        torch=python.torch,
        torch_error=python.torch_error or python.error,
        torch_cold=python.first_import,
        torch_warm=python.next_import,
    )

"""What Slurm's commands print that the checks read, and its parsers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.clock import Clock
from hpc_elastic.slurm.client import CommandRunner, CommandTimeoutError
from hpc_elastic.slurm.cluster_facts import config_fields

ASSOCIATION_FIELDS = ("MaxJobs", "MaxSubmitJobs", "GrpJobs", "MaxWall", "MaxTRES", "Account", "DefaultQOS", "QOS")
QOS_FIELDS = ("Name", "GraceTime", "PreemptMode", "MaxWall", "MaxTRES", "MaxJobsPU", "MaxSubmitJobsPU")
"""Of sacctmgr's ``format=``."""
_ANSWER_SECONDS = 60.0
_MORE_SECONDS = 20.0


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
    gres: str = ""
    """``sinfo -N -h -o '%N|%P|%G'``."""
    accounting_error: str = ""
    """Why sacct gives nothing; empty: it does."""
    mail_program_exists: bool = True
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


def ask_slurm(run: SlurmFacts, *, runner: CommandRunner, clock: Clock, env: Mapping[str, str]) -> SlurmFacts:
    """What Slurm's commands print; nothing is changed. `run` says what the run asks for."""
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
    user = env.get("USER") or str(os.getuid())
    limits = f"format={','.join(ASSOCIATION_FIELDS)}"
    mail = config_fields(config.stdout).get("MailProg", "")
    return replace(
        run,
        config=config.stdout,
        config_seconds=seconds,
        partitions=ask(runner, "scontrol", "show", "partition")[0] or "",
        associations=ask(runner, "sacctmgr", "-nP", "show", "assoc", f"user={user}", limits)[0],
        qos_limits=ask(runner, "sacctmgr", "-nP", "show", "qos", f"format={','.join(QOS_FIELDS)}")[0],
        gres=ask(runner, "sinfo", "-N", "-h", "-o", "%N|%P|%G")[0] or "",
        accounting_error=ask(runner, "sacct", "-X", "-n", "-P", "-o", "JobID", "-S", "now-1minutes")[1],
        mail_program_exists=not mail.startswith("/") or os.access(mail, os.X_OK),
    )


def ask(runner: CommandRunner, *argv: str) -> tuple[str | None, str]:
    """What a command printed; or None, and why."""
    try:
        done = runner(list(argv), timeout=_MORE_SECONDS)
    except (FileNotFoundError, PermissionError):
        return None, f"{argv[0]} is not on PATH"
    except CommandTimeoutError:
        return None, f"{argv[0]} did not answer in {_MORE_SECONDS:g} s"
    return (done.stdout, "") if done.rc == 0 else (None, " ".join((done.stderr or done.stdout).split()))


def parse_partitions(text: str) -> dict[str, dict[str, str]]:
    """The fields of each partition, of ``scontrol show partition``."""
    found: dict[str, dict[str, str]] = {}
    for block in text.split("PartitionName=")[1:]:
        words = block.split()
        found[words[0]] = dict(word.split("=", 1) for word in words[1:] if "=" in word)
    return found


def read_rows(text: str, names: Sequence[str]) -> list[dict[str, str]]:
    """The lines of ``sacctmgr -nP``, by column."""
    return [dict(zip(names, line.split("|"), strict=False)) for line in text.splitlines() if line.strip()]


def seconds_of(text: str) -> int:
    """``10`` of scontrol, ``1-02:03:04`` of sacctmgr."""
    days, dash, clock = text.partition("-")
    total = 0
    for part in (clock if dash else text).split(":"):
        total = total * 60 + (int(part) if part.isdigit() else 0)
    return total + (int(days) * 86400 if dash and days.isdigit() else 0)

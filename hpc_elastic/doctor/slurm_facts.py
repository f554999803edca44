"""What Slurm's commands print that the checks read, and its parsers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

ASSOCIATION_FIELDS = ("MaxJobs", "MaxSubmitJobs", "GrpJobs", "MaxWall", "MaxTRES", "Account", "DefaultQOS", "QOS")
QOS_FIELDS = ("Name", "GraceTime", "PreemptMode", "MaxWall", "MaxTRES", "MaxJobsPU", "MaxSubmitJobsPU")
"""Of sacctmgr's ``format=``."""


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

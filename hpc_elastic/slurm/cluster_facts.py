"""The site's setup: ``scontrol show config``, and the nodes of a partition by ``sinfo``. Pure parsers."""

from __future__ import annotations

import re

from msgspec import Struct

from hpc_elastic.slurm.notation import local_time

_LINE = re.compile(r"(\S+)\s+= (.*)\Z")
_LEADING_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
# sinfo adds a mark to a state: * not responding, ~ powered down, # powering up, $ reserved, @ to reboot, - planned.
_UNUSABLE = ("down", "drained", "draining", "drain", "fail", "failing", "error", "unknown", "inval", "maint", "future")


class SlurmConfig(Struct, frozen=True, kw_only=True):
    """Times in seconds."""

    version: tuple[int, ...]
    """``(22, 5, 8)``; empty: unknown."""
    kill_wait: int
    """Seconds from SIGTERM to SIGKILL on cancel, time limit and requeue."""
    slurmd_timeout: int
    """A node silent for longer is declared down; 0: never."""
    job_requeue: bool
    has_epilog: bool = False
    """The site runs a program on a node after each job, which may take its time."""
    cluster: str = ""
    now: float | None = None
    """The controller's time when it answered, seconds since the epoch; None: unknown."""

    @property
    def version_text(self) -> str:
        return ".".join(f"{part:02d}" if index == 1 else str(part) for index, part in enumerate(self.version))


def config_fields(text: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match:
            fields.setdefault(match.group(1), match.group(2).strip())
    return fields


def parse_show_config(text: str) -> SlurmConfig:
    fields = config_fields(text)
    return SlurmConfig(
        version=tuple(int(part) for part in re.findall(r"\d{1,9}", fields.get("SLURM_VERSION", ""))[:3]),
        kill_wait=_seconds(fields.get("KillWait"), 30),
        slurmd_timeout=_seconds(fields.get("SlurmdTimeout"), 300),
        job_requeue=fields.get("JobRequeue", "1").startswith("1"),
        cluster=fields.get("ClusterName", ""),
        now=local_time(text.partition("\n")[0].rpartition(" ")[2]),  # Configuration data as of 2026-11-21T02:15:51
        has_epilog=any(fields.get(key, "(null)") not in ("", "(null)", "N/A") for key in ("Epilog", "Epilog[0]")),
    )


def _seconds(value: str | None, default: int) -> int:
    match = _LEADING_NUMBER.match(value or "")
    return int(match.group()) if match else default


class PartitionNodes(Struct, frozen=True, kw_only=True):
    name: str
    default: bool
    names: frozenset[str]
    usable_names: frozenset[str]
    """Not down, drained or failing: busy ones count."""


def parse_sinfo_nodes(text: str) -> tuple[PartitionNodes, ...]:
    nodes: dict[str, dict[str, bool]] = {}
    for line in text.splitlines():
        cells = line.split("|", 4)
        if len(cells) < 3 or not cells[0]:
            continue
        host, partition, state = cells[:3]
        usable = not state.rstrip("*~#!%$@^-+").lower().startswith(_UNUSABLE) and not state.endswith("*")
        nodes.setdefault(partition, {})[host] = usable
    return tuple(
        PartitionNodes(
            name=name.rstrip("*"),
            default=name.endswith("*"),
            names=frozenset(hosts),
            usable_names=frozenset(host for host, is_usable in hosts.items() if is_usable),
        )
        for name, hosts in nodes.items()
    )

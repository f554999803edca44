"""The rig's configuration files, as text: pure functions of its layout and settings."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.rigs.nfs_emulator.settings import MountSettings

from . import debian_root
from .layout import CONTROLLER, CONTROLLER_PORT, DATABASE_PORT, NODE_PORT, USERS, Layout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What may differ from rig to rig.

    Attributes:
        accounting: Whether slurmdbd and MariaDB run, so that sacct answers.
        cpus: CPUs that each node claims, however many the machine has (config_overrides).
        memory_mb: MiB of memory that each node claims.
        gpus: GPUs that each node claims; the device files are plain ttys, enough for CUDA_VISIBLE_DEVICES.
        cred_expire: Seconds; a requeued job waits one more than these before it may start again (Slurm's default 120).
        max_time: The partition's time limit, in Slurm's words.
        cgroups: Whether each node holds its jobs to the memory they asked for (task/cgroup, ConstrainRAMSpace), so that
            one that takes more meets the kernel's OOM killer.
        release: The Debian release whose Slurm runs (`debian_root`); empty: this machine's.
        fs: Each host's own caching mount of what they share; ``None``: all see one folder, as if nothing were cached.
        slurm_conf: Lines of slurm.conf that override the rig's own; ``None`` leaves the line out.
        preemption: Whether there are partitions that are preempted by the partition ``urgent``, by `PREEMPTED`.
        extra_lines: Further whole lines of slurm.conf, such as partitions.
    """

    accounting: bool = True
    cpus: int = 4
    memory_mb: int = 4000
    gpus: int = 0
    cred_expire: int = 10
    max_time: str = "UNLIMITED"
    cgroups: bool = False
    fs: MountSettings | None = None
    release: str = ""
    preemption: bool = False
    slurm_conf: Mapping[str, str | int | None] = dataclasses.field(default_factory=dict)
    extra_lines: Sequence[str] = ()


PREEMPTED = {
    "requeued": ("REQUEUE", 25),
    "cancelled": ("CANCEL", 25),
    "requeued-at-once": ("REQUEUE", 0),
    "cancelled-at-once": ("CANCEL", 0),
}
"""Partition → what becomes of its jobs when one of ``urgent`` wants their nodes, and the grace time in seconds.

Slurm looks at each 30 s or so whether a grace time is over.
"""


def _preemption_lines() -> list[str]:
    partition = "PartitionName={} Nodes=ALL MaxTime=UNLIMITED State=UP PriorityTier={} PreemptMode={} GraceTime={}"
    low = [partition.format(name, 1, mode, grace) for name, (mode, grace) in PREEMPTED.items()]
    return [*low, partition.format("urgent", 10, "OFF", 0)]


def slurm_conf(layout: Layout, settings: Settings) -> str:
    values: dict[str, str | int | None] = {
        "ClusterName": layout.name,
        "SlurmctldHost": f"{CONTROLLER}({layout.address(CONTROLLER)})",
        "SlurmctldPort": CONTROLLER_PORT,
        "SlurmdPort": NODE_PORT,
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"cred_expire={settings.cred_expire}",
        "StateSaveLocation": str(layout.state),
        "SlurmdSpoolDir": f"{layout.spool}/%n",
        # /run is private to each host.
        "SlurmctldPidFile": "/run/slurmctld.pid",
        "SlurmdPidFile": "/run/slurmd.pid",
        "SlurmctldLogFile": f"{layout.logs}/slurmctld.log",
        "SlurmdLogFile": f"{layout.logs}/slurmd-%n.log",
        "SlurmctldDebug": "verbose",
        "SlurmdDebug": "verbose",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SwitchType": "switch/none",
        "MpiDefault": "none",
        "JobAcctGatherType": "jobacct_gather/none",
        "ReturnToService": 2,
        "SlurmdTimeout": 20,
        "SlurmctldTimeout": 20,
        # Slurm's default is 30. Within it an attempt that Slurm ends has to write its report, on a crowded machine too.
        "KillWait": 15,
        "MinJobAge": 300,
        "JobRequeue": 1,
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,bf_interval=1",
        "SlurmdParameters": "config_overrides",
        "GresTypes": "gpu" if settings.gpus else None,
        "AccountingStorageType": "accounting_storage/slurmdbd" if settings.accounting else "accounting_storage/none",
        "AccountingStorageHost": CONTROLLER if settings.accounting else None,
        "AccountingStoragePort": DATABASE_PORT if settings.accounting else None,
    }
    if settings.cgroups:
        values |= {
            "ProctrackType": "proctrack/cgroup",
            "TaskPlugin": "task/cgroup",
            "JobAcctGatherType": "jobacct_gather/cgroup",
            "SelectTypeParameters": "CR_Core_Memory",
        }
    if settings.preemption:
        values.update(PreemptType="preempt/partition_prio", PreemptMode="REQUEUE")
    values.update(settings.slurm_conf)
    gres = f" Gres=gpu:{settings.gpus}" if settings.gpus else ""
    lines = [f"{key}={value}" for key, value in values.items() if value is not None]
    lines += [
        f"NodeName={name} NodeAddr={layout.address(name)} CPUs={settings.cpus} RealMemory={settings.memory_mb}{gres}"
        for name in layout.node_names
    ]
    lines.append(f"PartitionName=main Nodes=ALL Default=YES MaxTime={settings.max_time} State=UP")
    lines += _preemption_lines() if settings.preemption else []
    lines += settings.extra_lines
    return "\n".join(lines) + "\n"


def slurmdbd_conf(layout: Layout) -> str:
    """Render slurmdbd.conf, which must be readable by root alone."""
    return "\n".join(
        [
            "AuthType=auth/munge",
            f"DbdHost={CONTROLLER}",
            f"DbdAddr={layout.address(CONTROLLER)}",
            f"DbdPort={DATABASE_PORT}",
            "SlurmUser=root",
            f"LogFile={layout.logs}/slurmdbd.log",
            "PidFile=/run/slurmdbd.pid",
            "StorageType=accounting_storage/mysql",
            "StorageHost=localhost",
            "StorageUser=root",
            f"StorageLoc=slurm_{layout.name}",
            "",
        ]
    )


def gres_conf(settings: Settings) -> str:
    """Render gres.conf: any device file will do, since no cgroup guards it."""
    if not settings.gpus:
        return ""
    return f"Name=gpu File=/dev/tty[0-{settings.gpus - 1}]\n" if settings.gpus > 1 else "Name=gpu File=/dev/tty0\n"


def cgroup_conf(version: tuple[int, int], settings: Settings) -> str:
    """Render cgroup.conf: from Slurm 23.11 on slurmd wants a cgroup plugin unless told that there is none."""
    if settings.cgroups:
        return "CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\n"
    return "CgroupPlugin=disabled\n" if version >= (23, 11) else ""


def hosts_file(layout: Layout) -> str:
    """Render /etc/hosts: a host's own name is its address, as on a cluster, and not loopback."""
    lines = ["127.0.0.1 localhost", *(f"{layout.address(host)} {host}" for host in layout.host_names)]
    return "\n".join(lines) + "\n"


def boot_script(
    layout: Layout,
    host: str,
    *,
    mounts: Mapping[Path, Path],
    client: Sequence[str] = (),
    groups: Sequence[str] = (),
    root: Path | None = None,
) -> str:
    """Render the program that is process 1 of `host`.

    It gives the host its name, private /tmp, /var/tmp, /run and /dev/shm, and a munge daemon of its own; marks the host
    as ready; then reaps whatever is left to it.

    Args:
        layout: The rig's.
        host: Which host.
        mounts: Folders to bind: where to → what.
        client: Lines that mount what the hosts share, where each has a client of its own.
        groups: Lines that put it into control groups of its own, where it has some.
        root: The folder that is its root, where it has one of its own.
    """
    binds = {Path("/etc/hosts"): layout.hosts_file, Path("/etc/slurm"): layout.etc}
    binds.update({Path("/home", user): layout.homes / user for user in USERS})
    binds.update(mounts)
    quote = shlex.quote
    if root is not None:
        bound = debian_root.entering_lines(root, binds)
    else:
        bound = [f"mount --bind {quote(str(source))} {quote(str(target))}" for target, source in binds.items()]
    lines = [
        "#!/bin/bash",
        f"# Process 1 of host {host} of the rig {layout.name}.",
        "set -eu",
        *groups,
        # A mount namespace starts with copies of all mounts; those of /run/netns would keep other hosts' networks.
        "umount --recursive --lazy /run/netns 2>/dev/null || true",
        f"echo {quote(host)} > /proc/sys/kernel/hostname",
        "umount --all --lazy --types fuse.nfs_emulator 2>/dev/null || true",  # copies too, of other tests' mounts
        *client,  # before /tmp is this host's own: the program may lie there
        *bound,
        "mkdir -p /dev/shm",
        *(
            f"mount -t tmpfs -o mode={mode} {host} {folder}"
            for folder, mode in (("/tmp", "1777"), ("/var/tmp", "1777"), ("/dev/shm", "1777"), ("/run", "0755"))
        ),
        "mkdir -m 0755 /run/munge /run/mysqld /run/lock",
        "chown mysql /run/mysqld 2>/dev/null || true",
        shlex.join(munged_command(layout)),
        f": > {quote(str(ready_mark(layout, host)))}",
        "while true; do sleep infinity & wait $!; done",
        "",
    ]
    return "\n".join(lines)


def munged_command(layout: Layout) -> list[str]:
    """What starts a host's munge daemon, inside that host."""
    return [
        "munged",
        f"--key-file={layout.munge_key}",
        *("--seed-file=/run/munge/seed", "--pid-file=/run/munge/pid", "--log-file=/run/munge/log", "--force"),
    ]


def ready_mark(layout: Layout, host: str) -> Path:
    """The file that `host` makes when its daemons may start."""
    return layout.boot / f"{host}.ready"

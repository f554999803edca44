"""Slurm's daemons and its database on a rig's hosts: started when what they need is there, and waited for."""

from __future__ import annotations

import re
import shutil
import signal
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .hosts import NETNS_FOLDER, Hosts
from .layout import CONTROLLER, CONTROLLER_PORT, DATABASE_PORT, NODE_PORT, SWITCH, Layout
from .processes import call, command_line, listens, wait_until

_DATABASE_TIMEOUT = 60.0
_DAEMON_TIMEOUT = 30.0


def slurm_version(root: Path | None = None) -> tuple[int, int]:
    """The installed Slurm's, such as (22, 5): this machine's, or that of another root folder."""
    enter = ["chroot", str(root)] if root is not None else []
    found = re.search(r"(\d+)\.(\d+)", call([*enter, "slurmctld", "-V"]))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def install_database(hosts: Hosts) -> None:
    """Make an empty MariaDB; needs no host but the switch (in whose namespace a clean-up finds a left-over one)."""
    layout = hosts.layout
    for folder in (layout.database, _temporary(layout)):
        folder.mkdir(mode=0o700)
        shutil.chown(folder, "mysql")
    options = [
        "--no-defaults",
        "--user=mysql",
        f"--datadir={layout.database}",
        f"--tmpdir={_temporary(layout)}",
        "--auth-root-authentication-method=normal",
    ]
    enter = ["nsenter", f"--net={NETNS_FOLDER / layout.netns(SWITCH)}", "--"]
    call([*enter, "mariadb-install-db", *options, "--skip-test-db", "--skip-name-resolve", "--innodb-log-file-size=8M"])


def _temporary(layout: Layout) -> Path:
    """For MariaDB's temporary tables. One that starts removes what any other has in the same folder (seen: the
    installation of a rig beside another's failed with "Unknown table 'mysql.tmp_user_sys'")."""
    return layout.database.with_name(f"{layout.database.name}-tmp")


def start_database(hosts: Hosts) -> None:
    """Start MariaDB on the controller and wait until it answers, on a socket in the controller's own /run."""
    options = [
        "--no-defaults",
        "--user=mysql",
        f"--datadir={hosts.layout.database}",
        f"--tmpdir={_temporary(hosts.layout)}",
        "--socket=/run/mysqld/mysqld.sock",
        "--pid-file=/run/mysqld/pid",
        "--skip-networking",
        # It is thrown away with the rig: no need to be safe, or large.
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-log-file-size=8M",
        "--innodb-buffer-pool-size=16M",
        "--innodb-lock-wait-timeout=900",
        "--performance-schema=OFF",
    ]
    hosts.start_daemon(CONTROLLER, ["mariadbd", *options], log=hosts.layout.logs / "mariadb.log")
    path = f"/proc/{hosts.init_pid(CONTROLLER)}/root/run/mysqld/mysqld.sock"

    def answers() -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(path)
            except OSError:
                return False
            return True

    wait_until(answers, timeout=_DATABASE_TIMEOUT, what="MariaDB answers")


def start_slurmdbd(hosts: Hosts) -> None:
    hosts.start_daemon(CONTROLLER, ["slurmdbd"])
    _wait_listening(hosts, CONTROLLER, DATABASE_PORT, "slurmdbd")
    call([*hosts.enter_argv(CONTROLLER), "sacctmgr", "--immediate", "add", "cluster", hosts.layout.name])


def start_slurmctld(hosts: Hosts) -> None:
    if not _daemon_pids(hosts, CONTROLLER, "slurmctld"):
        hosts.start_daemon(CONTROLLER, ["slurmctld"])
    _wait_listening(hosts, CONTROLLER, CONTROLLER_PORT, "slurmctld")


def stop_slurmctld(hosts: Hosts) -> None:
    """Tell slurmctld to end, as an administrator does, and wait until it has saved its state and is gone."""
    hosts.kill(CONTROLLER, _daemon_pids(hosts, CONTROLLER, "slurmctld"), signal.SIGTERM)
    wait_until(
        lambda: not _daemon_pids(hosts, CONTROLLER, "slurmctld"), timeout=_DAEMON_TIMEOUT, what="slurmctld is gone"
    )


def start_slurmd(hosts: Hosts, nodes: Sequence[str], *, booted: bool) -> None:
    """Start slurmd on each of the nodes; with `booted` it tells the controller that its node has rebooted."""
    argv = ["slurmd", "-b"] if booted else ["slurmd"]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda node: hosts.start_daemon(node, argv), nodes))
    for node in nodes:
        _wait_listening(hosts, node, NODE_PORT, "slurmd")


def stop_slurmd(hosts: Hosts, node: str) -> None:
    """Kill the node's slurmd alone, as a crash does: its jobs' steps go on, Slurm hears nothing more of the node."""
    pids = _daemon_pids(hosts, node, "slurmd")
    hosts.kill(node, pids)
    wait_until(lambda: not _daemon_pids(hosts, node, "slurmd"), timeout=_DAEMON_TIMEOUT, what=f"no slurmd on {node}")


def slurmd_runs(hosts: Hosts, node: str) -> bool:
    return bool(_daemon_pids(hosts, node, "slurmd"))


def _daemon_pids(hosts: Hosts, host: str, name: str) -> list[int]:
    return [pid for pid in hosts.pids(host) if command_line(pid).partition(" ")[0].rpartition("/")[2] == name]


def _wait_listening(hosts: Hosts, host: str, port: int, name: str) -> None:
    init = hosts.init_pid(host)
    wait_until(lambda: listens(init, port), timeout=_DAEMON_TIMEOUT, what=f"{name} listens on {host}")

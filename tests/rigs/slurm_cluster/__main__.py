"""The rig by hand.

python -m tests.rigs.slurm_cluster up 4
python -m tests.rigs.slurm_cluster --fs emulated up 4
python -m tests.rigs.slurm_cluster run -- srun -N4 hostname
python -m tests.rigs.slurm_cluster kill-node n3
python -m tests.rigs.slurm_cluster down
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from .cluster import SlurmCluster
from .emulated_fs import caches_of
from .hosts import rigs_with_leftovers
from .layout import CONTROLLER, LOGIN, USERS, RigError
from .prerequisites import install_prerequisites, missing_prerequisites

_DEFAULT_NAME = "hand"
_ME = "python -m tests.rigs.slurm_cluster"
_NODE_COMMANDS = {
    "kill-node": "cut the node's power",
    "start-node": "boot it again",
    "drain": "let Slurm start nothing new on it",
    "undrain": "let Slurm use it again",
    "cut-link": "pull its network cable",
    "heal-link": "plug it in again",
    "freeze-node": "stop all on it, as a kernel that hangs",
    "thaw-node": "let it go on",
    "reboot-node": "cut its power and boot it at once",
    "stop-slurmd": "crash its slurmd alone (start-node starts it again)",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_ME, description="A real Slurm of several nodes on this machine. Needs root.")
    parser.add_argument("--name", default=_DEFAULT_NAME, help="the rig's name (default: %(default)s)")
    parser.add_argument(
        "--fs",
        choices=("plain", "emulated"),
        default="plain",
        help="for `up`: what the hosts share is one folder, or each has a caching NFS client (default: %(default)s)",
    )
    parser.add_argument(
        "--fs-caches", type=float, default=3.0, metavar="SECONDS", help="how long these trust theirs (default: 3)"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="start a cluster, or start it anew; it stays up until `down`")
    up.add_argument("nodes", type=int, nargs="?", default=4, help="how many nodes (default: %(default)s)")
    up.add_argument("--foreground", action="store_true", help="stay, and take it down at Ctrl-C")
    up.add_argument(
        "--no-accounting", action="store_true", help="without slurmdbd and MariaDB (no sacct), a second less"
    )
    up.add_argument("--no-python", action="store_true", help="without the Python environment for jobs")
    up.add_argument("--cpus", type=int, default=4, help="CPUs that each node claims (default: %(default)s)")
    up.add_argument("--gpus", type=int, default=0, help="fake GPUs that each node claims (default: %(default)s)")
    up.add_argument("--cgroups", action="store_true", help="nodes hold jobs to the memory that they asked for")
    up.add_argument("--cred-expire", type=int, default=5, help="seconds a requeued job waits (default: %(default)s)")
    up.add_argument("--max-time", default="UNLIMITED", help="the partition's time limit")
    up.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a line of slurm.conf; repeatable")

    down = commands.add_parser("down", help="take it down and remove all that is left of it")
    down.add_argument("--all", action="store_true", help="every rig that nobody is using, whatever its name")
    commands.add_parser("status", help="say what Slurm says of nodes and jobs")
    commands.add_parser("logs", help="the end of every daemon's log")

    run = commands.add_parser("run", help="run a command on the login host, or on another")
    run.add_argument("--user", default="alice", choices=[*USERS, "root"], help="as whom (default: %(default)s)")
    run.add_argument("--node", default=LOGIN, help=f"where: {LOGIN} (default), {CONTROLLER}, n1 …")
    run.add_argument("--cwd", help="in which folder (default: the shared one)")
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND …")

    for name, help_text in _NODE_COMMANDS.items():
        commands.add_parser(name, help=help_text).add_argument("node")
    commands.add_parser("install", help="install the Debian packages that the rig needs")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.command == "install":
            install_prerequisites()
        for reason in missing_prerequisites():
            raise RigError(f"the rig can't run here: {reason} (as root: {_ME} install)")
        return _COMMANDS[options.command](options)
    except (RigError, PermissionError, subprocess.SubprocessError) as error:
        print(f"slurm_cluster: {error}", file=sys.stderr)
        return 1


def _up(options: argparse.Namespace) -> int:
    settings: dict[str, str | int | None] = {}
    for line in options.set:
        key, equals, value = line.partition("=")
        if not key or not equals:
            raise RigError(f"--set {line!r}: write it as KEY=VALUE")
        settings[key] = value or None
    cluster = SlurmCluster(
        options.nodes,
        name=options.name,
        accounting=not options.no_accounting,
        python=not options.no_python,
        settings=settings,
        cpus=options.cpus,
        gpus=options.gpus,
        cgroups=options.cgroups,
        cred_expire=options.cred_expire,
        max_time=options.max_time,
        fs=caches_of(options.fs_caches) if options.fs == "emulated" else None,
    )
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with_name = "" if options.name == _DEFAULT_NAME else f" --name {options.name}"
    try:
        cluster.start()
        print(f"{options.nodes} nodes are up after {time.monotonic() - started:.1f} s; shared folder: {cluster.shared}")
        print(f"run a command on it:  {_ME}{with_name} run -- srun -N{options.nodes} hostname")
        if not options.foreground:
            print(f"take it down:         {_ME}{with_name} down")
            cluster.detach()
            return 0
        print("Ctrl-C takes it down", flush=True)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        cluster.stop()
        return 0


def _down(options: argparse.Namespace) -> int:
    names = rigs_with_leftovers() if options.all else [options.name]
    for name in names:
        SlurmCluster.remove(name)
        print(f"rig {name} is down")
    return 0


def _status(options: argparse.Namespace) -> int:
    cluster = SlurmCluster.attach(options.name)
    print(f"rig {options.name}: {cluster.layout.nodes} nodes, shared folder {cluster.shared}")
    for argv in (["sinfo", "-N", "-l"], ["squeue", "-l"]):
        done = cluster.run(argv, user="root", node=CONTROLLER)
        print((done.stdout + done.stderr).strip())
    return 0


def _run(options: argparse.Namespace) -> int:
    argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    if not argv:
        raise RigError("run: name a command after --")
    cluster = SlurmCluster.attach(options.name)
    with cluster.popen(
        argv, user=options.user, node=options.node, cwd=options.cwd, stdin=None, stdout=None, stderr=None
    ) as process:
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:  # the command has had it too: let it end
                continue
    return code if code >= 0 else 128 - code


def _logs(options: argparse.Namespace) -> int:
    print(SlurmCluster.attach(options.name).logs())
    return 0


def _node_command(options: argparse.Namespace) -> int:
    cluster = SlurmCluster.attach(options.name)
    action: Callable[[str], None] = getattr(cluster, options.command.replace("-", "_"))
    action(options.node)
    return 0


_COMMANDS = {
    "up": _up,
    "down": _down,
    "status": _status,
    "run": _run,
    "logs": _logs,
    "install": lambda options: 0,
    **dict.fromkeys(_NODE_COMMANDS, _node_command),
}

if __name__ == "__main__":
    sys.exit(main())

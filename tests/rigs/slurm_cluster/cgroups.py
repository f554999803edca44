"""Control groups of a rig's hosts: freezing one, and the tree in which its Slurm holds jobs to their memory.

A host's groups have the name of its network namespace, so that they are found again from the rig's name alone. They
are of version 1, as Slurm's plugin for that needs them; freezing does without, by SIGSTOP, where there is none.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from .layout import NETNS_PREFIX, RigError
from .processes import wait_until

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "freezer", "cpuset", "cpuacct", "devices")
"""What Slurm's proctrack/cgroup, task/cgroup and jobacct_gather/cgroup ask for."""

_FREEZER = ROOT / "freezer"
_FREEZE_TIMEOUT = 10.0


def missing_controllers() -> tuple[str, ...]:
    """Those that this machine does not offer in version 1: then no rig with `Settings.cgroups` can run."""
    return tuple(name for name in CONTROLLERS if not (ROOT / name / "cgroup.procs").exists())


def require() -> None:
    """Raises: RigError: this machine has no such control groups."""
    if missing := missing_controllers():
        raise RigError(f"the rig can't hold jobs to their memory: no cgroup (version 1) for {', '.join(missing)}")


# Memory --------------------------------------------------------------------------------------------------------------


def boot_lines(group: str) -> tuple[str, ...]:
    """The first lines of a host's boot script: its process 1 goes into groups of its own, and sees no others."""
    names = " ".join(CONTROLLERS)
    quoted = shlex.quote(group)
    return (
        'if [ "${1-}" != inside ]; then',
        f"  for controller in {names}; do",
        f"    group={ROOT}/$controller/{quoted}",
        '    mkdir -p "$group"',
        "    if [ $controller = cpuset ]; then",  # which takes no process before it has these
        f'      for file in cpuset.cpus cpuset.mems; do cat "{ROOT}/cpuset/$file" > "$group/$file"; done',
        "    fi",
        '    echo 0 > "$group/cgroup.procs"',
        "  done",
        '  exec unshare --cgroup bash "$0" inside',
        "fi",
        f"mount -t tmpfs cgroup {ROOT}",
        f"for controller in {names}; do",
        f"  mkdir {ROOT}/$controller",
        f"  mount -t cgroup -o $controller $controller {ROOT}/$controller",
        "done",
    )


def joining(group: str) -> list[str]:
    """What goes before a daemon's command on a host, for it to be in the host's groups as if it had been booted there.

    Nothing, where the host has no groups of its own.
    """
    if not (ROOT / "memory" / group).is_dir():
        return []
    files = " ".join(f"{ROOT}/{name}/cgroup.procs" for name in CONTROLLERS)
    return ["bash", "-c", f'for file in {files}; do echo 0 > $file; done; exec "$@"', "bash"]


# Freezing ------------------------------------------------------------------------------------------------------------


def freeze(group: str, pids: Callable[[], Iterable[int]]) -> None:
    """Stop a host's processes where they are, without their noticing. `pids` is asked until all are in the group."""
    if not (_FREEZER / "cgroup.procs").exists():
        _stop(pids)
        return
    folder = _FREEZER / group
    folder.mkdir(exist_ok=True)

    def all_inside() -> bool:
        outside = [pid for pid in pids() if not _is_inside(pid, group)]
        for pid in outside:
            with suppress(ProcessLookupError):
                (folder / "cgroup.procs").write_text(f"{pid}\n")
        return not outside

    wait_until(all_inside, timeout=_FREEZE_TIMEOUT, what=f"the processes of {group} are in one group")
    (folder / "freezer.state").write_text("FROZEN\n")
    wait_until(
        lambda: (folder / "freezer.state").read_text().strip() == "FROZEN",
        timeout=_FREEZE_TIMEOUT,
        what=f"{group} is frozen",
    )


def thaw(group: str, pids: Iterable[int] = ()) -> None:
    """Let a host go on; one that is not frozen is left as it is. A killed one only dies now."""
    state = _FREEZER / group / "freezer.state"
    if state.exists():
        state.write_text("THAWED\n")
    elif not (_FREEZER / "cgroup.procs").exists():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def remove(rig: str) -> None:
    """Remove the groups of all hosts of a rig, whose processes are gone."""
    for controller in CONTROLLERS:
        for folder in (ROOT / controller).glob(f"{NETNS_PREFIX}{rig}-*"):
            for path, _, _ in os.walk(folder, topdown=False):
                with suppress(OSError):  # a process that is just ending is counted for another moment
                    os.rmdir(path)


def _is_inside(pid: int, group: str) -> bool:
    """Whether a process is in the group or below it; one that is gone counts as such."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return True
    paths = [line.split(":", 2)[2] for line in lines if line.split(":", 2)[1] == "freezer"]
    return any(f"{path}/".startswith(f"/{group}/") for path in paths)


def _stop(pids: Callable[[], Iterable[int]]) -> None:
    """SIGSTOP to each until a look finds no new one."""
    seen: set[int] = set()

    def all_stopped() -> bool:
        new = set(pids()) - seen
        for pid in new:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        seen.update(new)
        return not new

    wait_until(all_stopped, timeout=_FREEZE_TIMEOUT, what="all processes are stopped")

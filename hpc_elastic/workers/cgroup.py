"""How often the kernel killed a process of this cgroup for want of memory: the evidence that "-9" was an OOM kill.

Read before the workers start and after one has died; a counter that went up is the proof. Under Slurm with
task/cgroup the kill is counted in the *task's* cgroup, the agent's own (seen on 22.05.8, cgroup v1 and v2).
"""

from __future__ import annotations

import os


def oom_kill_count(pid: int | str = "self", *, proc: str = "/proc") -> int | None:
    """OOM kills counted so far in the memory cgroup of a process.

    Returns:
        The counter, or None where no cgroup with one can be read: then nothing is known of OOM kills.
    """
    found = _memory_cgroup(pid, proc)
    if found is None:
        return None
    folder, _, is_v2 = found
    return _counter(folder, "memory.events" if is_v2 else "memory.oom_control")


def memory_folders(pid: int | str = "self", *, proc: str = "/proc") -> list[tuple[str, bool]]:
    """The memory cgroup of a process and all above it that can be seen from here, the closest first.

    Returns:
        (folder, whether it is of version 2); empty where there is none.
    """
    found = _memory_cgroup(pid, proc)
    if found is None:
        return []
    folder, top, is_v2 = found
    folders = [(folder, is_v2)]
    while folder != top and folder.startswith(top):
        folder = os.path.dirname(folder)
        folders.append((folder, is_v2))
    return folders


def _memory_cgroup(pid: int | str, proc: str) -> tuple[str, str, bool] | None:
    """(folder, mount point, whether it is of version 2)."""
    try:
        memberships = _read(os.path.join(proc, str(pid), "cgroup"))
        mounts = _read(os.path.join(proc, "self", "mountinfo"))
    except OSError:
        return None
    v1_path = v2_path = None
    for line in memberships.splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        if parts[1] == "" and parts[0] == "0":
            v2_path = parts[2]
        elif "memory" in parts[1].split(","):
            v1_path = parts[2]
    # With both mounted (hybrid), the memory controller is where v1 lists it.
    if v1_path is not None:
        where = _folder(mounts, "cgroup", v1_path, controller="memory")
        return (*where, False) if where is not None else None
    if v2_path is not None:
        where = _folder(mounts, "cgroup2", v2_path, controller=None)
        return (*where, True) if where is not None else None
    return None


def _read(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(1 << 20).decode("utf-8", "replace")


def _folder(mounts: str, kind: str, path: str, *, controller: str | None) -> tuple[str, str] | None:
    """The folder of the cgroup `path`, and its mount point: mountinfo's fields 4 (root) and 5, proc(5).

    Of several mounts the last one that has the path counts: it lies over the others.
    """
    found = guessed = None
    for line in mounts.splitlines():
        left, separator, right = line.partition(" - ")
        fields, after = left.split(" "), right.split(" ")
        if not separator or len(fields) < 5 or len(after) < 3 or after[0] != kind:
            continue
        if controller is not None and controller not in after[2].split(","):
            continue
        root, point = _unescape(fields[3]), _unescape(fields[4])
        if "/../" in root + "/":  # mounted outside our cgroup namespace, whose place in it is not known
            continue
        if root == "/":
            relative = path
        elif path == root or path.startswith(root + "/"):
            relative = path[len(root) :] or "/"
        else:
            # A container sees a part of the tree; a path outside of it can't be reached from here.
            guessed = point, point
            continue
        if "/../" in relative + "/":  # a cgroup outside our cgroup namespace
            continue
        found = point + ("" if relative == "/" else relative), point
    return found or guessed


def _unescape(field: str) -> str:
    for code, char in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        field = field.replace(code, char)
    return field


def _counter(folder: str, name: str) -> int | None:
    try:
        text = _read(os.path.join(folder, name))
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill" and value.strip().isdigit():
            return int(value)
    return None

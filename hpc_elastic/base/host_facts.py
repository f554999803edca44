"""Facts of this host: its addresses and links, free memory, the arguments of processes, and what the kernel tells; and
commands by which one process of ours starts another Python.

This module alone imports psutil. That takes 13 ms and 1.3 MB, so each function does it when it is called first.
`hpc_elastic.workers.tree` says how processes are found and signalled, and why not with psutil.

The working directory is never first on the path of a Python that is started: ``python -c`` and ``python -m`` put it
there, and a ``json.py`` in it would be imported in place of Python's: from Python 3.13 on ``-c`` imports ``linecache``
before the first statement. A test finds other ways of starting one.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import hpc_elastic


def interface_addresses() -> list[tuple[str, list[str]]]:
    import psutil

    return [
        (name, [entry.address for entry in addresses if entry.family == socket.AF_INET])
        for name, addresses in sorted(psutil.net_if_addrs().items())
    ]


def available_memory() -> int | None:
    """Bytes that programs can have without swapping, file caches included; None: unreadable.

    It is the node's memory: psutil does not know the limits of a cgroup.
    """
    import psutil

    try:
        return psutil.virtual_memory().available
    except (OSError, ValueError, KeyError, IndexError):  # the last three: a sandbox's /proc/meminfo
        return None


def overcommits_memory() -> bool:
    """Check whether the kernel grants a process more memory than is free; it then kills one where memory runs out."""
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "2"
    except OSError:
        return False


def command_line(pid: int) -> list[str]:
    """The arguments of a process; empty where it is gone, another user's, or just being loaded."""
    import psutil

    try:
        return psutil.Process(pid).cmdline()
    except (OSError, psutil.Error):
        return []


def files_written_by(pid: int) -> list[Path]:
    """Regular files that a process has open for writing, not for appending; empty as for `command_line`."""
    import psutil

    try:
        return [Path(file.path) for file in psutil.Process(pid).open_files() if file.mode in ("w", "r+")]
    except (OSError, psutil.Error):
        return []


def kernel_text(path: str, errors: str = "replace") -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode("utf-8", errors)
    except OSError:
        return ""


def kernel_fields(path: str, separator: str = ":") -> dict[str, str]:
    lines = (line.partition(separator) for line in kernel_text(path).splitlines())
    return {name: value.strip() for name, found, value in lines if found}


def unescape_mount(cell: str) -> str:
    """A path in mountinfo, proc(5)."""
    for code, char in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        cell = cell.replace(code, char)
    return cell


LOOPBACK = "127.0.0.1"
_SIOCGIFFLAGS = 0x8913
_IFF_RUNNING = 0x40
"""The interface is up and, as far as its driver knows, has a link: the far end of the cable answers."""


def candidate_addresses(node_name: str) -> list[str]:
    """IPv4 addresses of this host: those that its name resolves to, then those of its interfaces; never the loopback.

    A name that resolves to 127.0.1.1, as Debian's installer writes it, is useless to others.
    """
    found: dict[str, None] = {}
    for name in (node_name, socket.gethostname()):
        try:
            for entry in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_DGRAM):
                found.setdefault(str(entry[4][0]))
        except (OSError, UnicodeError):
            continue  # not every node name is a host name
    for name, addresses in interface_addresses():
        if not (name == "lo" or name.startswith(("docker", "virbr", "veth", "br-"))):
            found.update(dict.fromkeys(addresses))
    return [address for address in found if not address.startswith("127.")]


def choose_master_address(*, given: str | None, reached: Iterable[str], candidates: Iterable[str]) -> str:
    """Choose the address that workers on other nodes get: `given` by the user, else one at which another node's packet
    arrived (`reached`), else one of `candidate_addresses`."""
    return given or next(iter((*reached, *candidates)), LOOPBACK)


def links(addresses: Collection[str]) -> list[tuple[str, bool]]:
    """The network interfaces that have one of these addresses, and whether each has a link.

    Empty where there are none, as in a container whose interfaces are not the host's, or they are unreadable.
    """
    try:
        names = [name for name, found in interface_addresses() if not set(addresses).isdisjoint(found)]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as asked:
            # Not from /sys: that may be another network namespace's.
            requests = [struct.pack("16sh14x", name.encode()[:15], 0) for name in names]
            flags = [struct.unpack_from("h", fcntl.ioctl(asked, _SIOCGIFFLAGS, one), 16)[0] for one in requests]
        return [(name, bool(flag & _IFF_RUNNING)) for name, flag in zip(names, flags, strict=True)]
    except OSError:
        return []


def filesystem_type(real: str, *, mountinfo: str = "/proc/self/mountinfo") -> str | None:
    """The type of the filesystem that `real`, a path without links, is on; None: unknown.

    proc(5): it is the longest mount point above it, the last one mounted there.
    """
    best, kind = -1, None
    for line in kernel_text(mountinfo, "surrogateescape").split("\n"):
        left, _, right = line.partition(" - ")
        cells = left.split(" ")
        if len(cells) < 5 or not right:
            continue
        mount = unescape_mount(cells[4])
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= best:
            best, kind = len(mount), right.split(" ")[0]
    return kind


_SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()


def own_command(*arguments: str) -> list[str]:
    """The argument list that runs ``hpc-elastic ARGUMENTS`` with this interpreter and this very package."""
    return [*module_command("hpc_elastic.cli.main", "console_main"), *arguments]


def module_command(module: str, function: str) -> list[str]:
    """The same for a function of one of this package's modules, which takes no arguments."""
    parent = str(Path(hpc_elastic.__file__).resolve().parent.parent)
    path = f"[{parent!r}, *filter(None, sys.path)]"
    boot = f"import sys; sys.path[:] = {path}; from {module} import {function}; {function}()"
    return [sys.executable, *_SAFE_PATH, "-c", boot]


def worker_arguments(module: str) -> tuple[str, ...]:
    """Arguments of an interpreter that has this package, to run a module's ``main(arguments)`` in a worker.

    Like ``-m MODULE``; but modules of the working directory, which are found too, hide no others.
    """
    boot = f"import sys; sys.path.sort(key=lambda path: path == ''); from {module} import main; main(sys.argv[2:])"
    return "-u", "-c", boot, module


def source_command(python: str, source: str) -> list[str]:
    """The argument list that runs a text in any interpreter, from Python 3.6 on, with `source_environment`.

    Not by ``-P``, which came with 3.11, nor by ``-I``, which leaves out PYTHONPATH and the user's own packages.
    """
    return [python, "-c", f"import sys; sys.path[:] = filter(None, sys.path)\n{source}"]


def source_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {**environ, "PYTHONSAFEPATH": "1"}


def ask_interpreter(python: str, source: str, *, seconds: float) -> str | None:
    try:
        done = subprocess.run(
            source_command(python, source),
            env=source_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def idle_arguments() -> tuple[str, ...]:
    """Arguments of an interpreter to import its ``sitecustomize``, and do nothing then."""
    return "-u", "-c", "pass"

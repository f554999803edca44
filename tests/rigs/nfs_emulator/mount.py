"""One mount: a process that serves FUSE in the foreground, and commands on a Unix socket."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from tests.rigs.nfs_emulator.client import Client
from tests.rigs.nfs_emulator.filesystem import FUSE_OPTIONS, EmulatedFilesystem
from tests.rigs.nfs_emulator.fuse_library import mfusepy
from tests.rigs.nfs_emulator.server import Server
from tests.rigs.nfs_emulator.settings import Fault, MountSettings, changed_settings

FILESYSTEM_TYPE = "nfs_emulator"
_ENDED_BY_SIGNAL = 8
"""What libfuse's fuse_main returns then (3.14); it has unmounted."""


def serve(backing: str, mountpoint: str, *, control: str, settings: MountSettings, until_stdin_closes: bool) -> None:
    """Mount, and serve until unmounted, or until a signal (SIGTERM, SIGINT, SIGHUP: libfuse unmounts).

    Args:
        backing: The server's folder.
        mountpoint: An empty folder.
        control: Where to put the Unix socket for commands; empty: none.
        settings: At first; `change` changes them.
        until_stdin_closes: Unmount and end when whoever started this is gone.
    """
    os.umask(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 16384)), hard))
    os.makedirs(mountpoint, exist_ok=True)
    server = Server(backing, settings)
    client = Client(server)
    filesystem = EmulatedFilesystem(server, client)
    if control:
        _start(_listen, control, server, client, filesystem.lock_of_mount)
    if until_stdin_closes:
        _start(_end_with_parent, mountpoint, control)
    _start(_write_back, client, filesystem.lock_of_mount)
    options = {**FUSE_OPTIONS, "subtype": FILESYSTEM_TYPE, "fsname": f"{FILESYSTEM_TYPE}-{os.getpid()}"}
    try:
        mfusepy.FUSE(filesystem, mountpoint, **options)
    except RuntimeError as error:
        if error.args != (_ENDED_BY_SIGNAL,):
            raise
    finally:
        if until_stdin_closes:
            _remove_folders(mountpoint, control)


def _start(target: Any, *arguments: Any) -> None:
    threading.Thread(target=target, args=arguments, daemon=True).start()


def _write_back(client: Client, lock: threading.Lock) -> None:
    while True:
        time.sleep(min(1.0, max(0.05, client.settings.written_back / 6)))
        with lock:
            client.write_back_old()


def _end_with_parent(mountpoint: str, control: str) -> None:
    while os.read(0, 4096):
        pass
    unmount(mountpoint)  # which ends the main thread, unless requests are frozen
    time.sleep(2)
    _remove_folders(mountpoint, control)
    os._exit(0)


def _remove_folders(mountpoint: str, control: str) -> None:
    for remove, path in ((os.unlink, control), (os.rmdir, mountpoint), (os.rmdir, os.path.dirname(mountpoint))):
        try:
            remove(path)  # the last of several takes the folder that they lie in
        except OSError:
            pass


def unmount(mountpoint: str) -> None:
    """Take a mount away by its path, whether or not its process lives or answers."""
    libc = ctypes.CDLL(None, use_errno=True)
    detach = 2  # MNT_DETACH: also where somebody still has it open
    if libc.umount2(os.fsencode(mountpoint), detach) != 0 and os.geteuid() != 0:
        subprocess.run(["fusermount3", "-u", "-z", mountpoint], stderr=subprocess.DEVNULL, check=False)


def _listen(path: str, server: Server, client: Client, lock: threading.Lock) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(8)
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as stream:
            try:
                answer = _obey(json.loads(stream.readline()), server, client, lock)
            except Exception as error:  # told to whoever asked
                answer = {"error": f"{type(error).__name__}: {error}"}
            stream.write(json.dumps(answer) + "\n")


def _obey(command: Mapping[str, Any], server: Server, client: Client, lock: threading.Lock) -> Mapping[str, Any]:
    arguments = dict(command)
    name = arguments.pop("command")
    if name == "change":
        server.settings = changed_settings(server.settings, arguments)
    elif name == "fail":
        server.add_fault(Fault(**arguments))
    elif name == "heal":
        server.heal()
    elif name == "freeze":
        server.freeze()
    elif name == "thaw":
        server.thaw()
    elif name == "drop_caches":
        with lock:
            client.drop_caches()
    elif name == "reset_counters":
        server.counters.clear()
    elif name != "counters":
        raise ValueError(f"unknown command {name!r}")
    return {"counters": dict(server.counters)}


def main(argv: list[str]) -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="python -m tests.rigs.nfs_emulator", description="Mount one emulated client.")
    parser.add_argument("backing", help="the server's folder")
    parser.add_argument("mountpoint")
    parser.add_argument("--control", default="", help="Unix socket to make for commands")
    parser.add_argument("--settings", default="{}", help="MountSettings, as JSON")
    parser.add_argument("--until-stdin-closes", action="store_true", help="unmount when the starting process is gone")
    options = parser.parse_args(argv)
    settings = changed_settings(MountSettings(), json.loads(options.settings))
    serve(
        os.path.abspath(options.backing),
        os.path.abspath(options.mountpoint),
        control=options.control,
        settings=settings,
        until_stdin_closes=options.until_stdin_closes,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Process number 1 of a rig's namespaces: brings the filesystem up, obeys, and takes everything away at its end.

On stdin come lines, each answered with a line of JSON on stdout; the first answer is that the mounts are ready. They
are ``freeze`` and ``thaw``, with a number for a client instead of the server, and ``logs``. The end of stdin, SIGTERM
and SIGINT are its end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.rigs.network_mounts.kinds import KINDS
from tests.rigs.network_mounts.location import Site, remove


def keep(kind: str, folder: Path, *, mounts: int, until_signal: bool) -> None:
    """Bring a filesystem up in an empty folder, which goes in the end, and stay until told otherwise."""
    os.umask(0o022)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _leave)
    site = Site(folder, mounts=mounts)
    try:
        try:
            site.call(["ip", "link", "set", "lo", "up"])
            KINDS[kind].start(site)
        except Exception as error:
            _answer(error=str(error))
            return
        _answer(mounts=[str(path) for path in site.mounts])
        if until_signal:
            while True:
                signal.pause()
        for line in sys.stdin:
            _obey(line.strip(), site)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        remove(folder)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(0)


def _obey(command: str, site: Site) -> None:
    verb, _, number = command.partition(" ")
    if verb in ("freeze", "thaw"):
        daemons = [site.clients[int(number)]] if number else site.servers
        for pid in [daemon.pid for daemon in daemons] if number else site.server_pids():
            os.kill(pid, signal.SIGSTOP if verb == "freeze" else signal.SIGCONT)
        if verb == "freeze":
            for daemon in daemons:  # until then some of its threads may still answer
                os.waitid(os.P_PID, daemon.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        _answer()
    elif command == "logs":
        _answer(logs=site.log_tails())
    else:
        _answer(error=f"unknown command {command!r}")


def _answer(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)

"""A caching mount per host over what the hosts share: each host is a client of its own of the NFS emulator.

The mount's process is started by the host's boot script and lives in the host's namespaces, so a power cut takes it and
all that it has not written back. The controller is the server: it sees the folder itself, as does whoever runs the rig.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from tests.rigs.nfs_emulator import MountSettings, tell, unavailable
from tests.rigs.nfs_emulator.settings import settings_to_json

from .layout import CONTROLLER, Layout, RigError

PROJECT = Path(__file__).resolve().parents[3]


def caches_of(seconds: float) -> MountSettings:
    """The usual settings, with all caches holding for so long (``actimeo``)."""
    return MountSettings(attributes=seconds, directories=seconds)


def require() -> None:
    """Raises: RigError: no emulated filesystem can be mounted here; the message says why."""
    reason = unavailable()
    if reason is not None:
        raise RigError(f"the emulated filesystem can't run: {reason}")


def mount_lines(layout: Layout, host: str, settings: MountSettings) -> tuple[str, ...]:
    """The lines of a boot script that mount the host's client over the shared folder, and wait until it is there."""
    quote = shlex.quote
    server, client = quote(str(layout.server)), quote(str(layout.client))
    control = quote(str(layout.client_control(host)))
    program = f"{quote(sys.executable)} -m tests.rigs.nfs_emulator {server} {client} --control {control}"
    return (
        f"rm -f {control}",
        f"(cd {quote(str(PROJECT))} && exec {program} --settings {quote(settings_to_json(settings))}) &",
        f"until mountpoint -q {client}; do kill -0 $!; sleep 0.02; done",
        f"mount --bind {client} {server}",  # whose process holds the folder below
    )


def tell_client(layout: Layout, host: str, command: str, **arguments: Any) -> dict[str, Any]:
    """Give a host's client a command: see `NfsEmulator.control`."""
    if host == CONTROLLER:
        raise RigError(f"{host} is the server itself, and no client")
    try:
        return tell(layout.client_control(host), {"command": command, **arguments})
    except OSError as error:
        raise RigError(f"host {host!r} has no emulated mount that answers: {error}") from None

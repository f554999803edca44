"""MooseFS: a master, and one chunk server on a disk in memory.

The master lets nobody rewrite a file's data in its first ten seconds: so long takes its start.
Its times are whole seconds; a client remembers names that were not there for a second.
"""

from __future__ import annotations

import shutil
import socket

from tests.rigs.network_mounts.location import Site

_ADDRESS = "10.0.0.1"
"""Of a link of its own: MooseFS refuses the loopback's."""
_PORT = 9421
_EMPTY = "/var/lib/mfs/metadata.mfs.empty"


def start(site: Site) -> None:
    site.mount_disk(16384)  # the master counts 64 MiB for every file that is being written
    for name in ("master", "chunk"):
        (site.folder / name).mkdir()
    site.call(["ip", "link", "add", "moose0", "type", "veth", "peer", "name", "moose1"])
    site.call(["ip", "address", "add", f"{_ADDRESS}/24", "dev", "moose0"])
    for link in ("moose0", "moose1"):
        site.call(["ip", "link", "set", link, "up"])
    shutil.copy(_EMPTY, site.folder / "master" / "metadata.mfs")
    who = {"WORKING_USER": "root", "WORKING_GROUP": "root", "LOCK_MEMORY": 0}
    exports = site.write("exports", "* / rw,alldirs,admin,maproot=0:0\n* . rw\n")
    listen = {f"MATO{kind}_LISTEN_HOST": _ADDRESS for kind in ("ML", "CS", "CL")}
    master = _settings(
        **who,
        DATA_PATH=site.folder / "master",
        EXPORTS_FILENAME=exports,
        TOPOLOGY_FILENAME=site.write("topology", ""),
        **listen,
    )
    chunk = _settings(
        **who,
        DATA_PATH=site.folder / "chunk",
        HDD_CONF_FILENAME=site.write("disks", f"{site.server}\n"),
        MASTER_HOST=_ADDRESS,
        BIND_HOST=_ADDRESS,
        CSSERV_LISTEN_HOST=_ADDRESS,
        MASTER_RECONNECTION_DELAY=1,
    )
    site.serve("master", ["mfsmaster", "-c", site.write("master.cfg", master), "-f", "start"])
    site.wait(_master_listens, "the master")
    site.serve("chunk", ["mfschunkserver", "-c", site.write("chunk.cfg", chunk), "-f", "start"])
    for number, path in enumerate(site.mounts):
        argv = ["mfsmount", path, "-f", "-H", _ADDRESS, "-o", "mfsdonotrememberpassword"]
        site.connect(number, argv)
    site.wait_mounted()
    site.wait_usable()


def _settings(**values: object) -> str:
    return "".join(f"{key} = {value}\n" for key, value in values.items())


def _master_listens() -> bool:
    with socket.create_connection((_ADDRESS, _PORT), timeout=1):
        return True

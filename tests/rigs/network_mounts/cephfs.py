"""CephFS: a monitor, one OSD in memory, one metadata server; no manager, no authentication.

Its clients ask for leave to cache, which is taken back when another changes something: all see the same at once.
"""

from __future__ import annotations

import json
import uuid

from tests.rigs.network_mounts.location import Site

_ADDRESS = "[v2:127.0.0.1:3300,v1:127.0.0.1:6789]"


def start(site: Site) -> None:
    folders = {name: site.folder / name for name in ("mon", "osd", "mds", "run")}
    for folder in folders.values():
        folder.mkdir()
    cluster = str(uuid.uuid4())
    settings = {
        "fsid": cluster,
        "mon host": _ADDRESS,
        "mon initial members": "a",
        "auth cluster required": "none",
        "auth service required": "none",
        "auth client required": "none",
        "public network": "127.0.0.0/8",
        "run dir": folders["run"],
        "admin socket": "",
        "pid file": "",
        "log file": site.logs / "$name.log",
        "mon data": folders["mon"],
        "osd data": folders["osd"],
        "mds data": folders["mds"],
        # One OSD holds the only copy, in memory.
        "osd pool default size": 1,
        "osd pool default min size": 1,
        "mon allow pool size one": "true",
        "osd crush chooseleaf type": 0,
        "osd objectstore": "memstore",
        "memstore device bytes": 256 << 20,
        "mon data avail crit": 0,
        "paxos propose interval": 0.1,
        # They would be looked up by a process id that its namespace hides.
        "fuse set user groups": "false",
    }
    text = "[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items())
    conf = ["-c", site.write("ceph.conf", text)]
    monmap = site.folder / "monmap"
    site.call(["monmaptool", "--create", "--fsid", cluster, "--addv", "a", _ADDRESS, monmap])
    site.call(["ceph-mon", *conf, "--mkfs", "-i", "a", "--monmap", monmap])
    site.serve("mon", ["ceph-mon", *conf, "-i", "a", "-f"])
    osd = str(uuid.uuid4())
    site.call(["ceph", *conf, "osd", "new", osd])
    site.call(["ceph-osd", *conf, "-i", "0", "--mkfs", "--osd-uuid", osd])
    site.serve("osd", ["ceph-osd", *conf, "-i", "0", "-f"])
    site.serve("mds", ["ceph-mds", *conf, "-i", "a", "-f"])
    for pool in ("data", "metadata"):
        site.call(["ceph", *conf, "osd", "pool", "create", pool, "1"])
    site.call(["ceph", *conf, "fs", "new", "fs", "metadata", "data"])
    site.wait(
        lambda: '"up:active"' in json.dumps(json.loads(site.call(["ceph", *conf, "mds", "stat", "-f", "json"]))),
        "the metadata server",
    )
    for number, path in enumerate(site.mounts):
        site.connect(number, ["ceph-fuse", *conf, "-f", "-n", "client.admin", path])
    site.wait_mounted()
    site.wait_usable()

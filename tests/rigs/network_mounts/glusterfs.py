"""GlusterFS without its management daemon: a brick and its clients from two volume files.

The clients have the translators of a volume with default options: of all that was tried here, they cache the most
(names, small files' contents and attributes for a second, whatever the server says), and answer ESTALE the most.
"""

from __future__ import annotations

from tests.rigs.network_mounts.location import Site

_PORT = 49152
_CLIENT_STACK = (
    "cluster/distribute",
    "performance/write-behind",
    "performance/read-ahead",
    "performance/readdir-ahead",
    "performance/io-cache",
    "performance/open-behind",
    "performance/quick-read",
    "performance/md-cache",
)


def start(site: Site) -> None:
    site.mount_disk(64)
    (site.server / "brick").mkdir()
    brick = _volume("posix", "storage/posix", directory=site.server / "brick")
    brick += _volume("locks", "features/locks", below="posix")
    brick += _volume("brick", "performance/io-threads", below="locks")
    address = {"transport.socket.bind-address": "127.0.0.1", "transport.socket.listen-port": _PORT}
    transport = {"transport-type": "tcp"}
    brick += _volume(
        "server", "protocol/server", below="brick", **transport, **address, **{"auth.addr.brick.allow": "*"}
    )
    remote = {"remote-host": "127.0.0.1", "remote-port": _PORT, "remote-subvolume": "brick"}
    client = _volume("client", "protocol/client", **transport, **remote)
    below = "client"
    for kind in _CLIENT_STACK:
        name = kind.partition("/")[2]
        client += _volume(name, kind, below=below)
        below = name
    brick_file, client_file = site.write("brick.vol", brick), site.write("client.vol", client)
    site.serve("brick", ["glusterfsd", "-N", "-f", brick_file, "-l", site.logs / "brick.log"])
    for number, path in enumerate(site.mounts):
        log = site.logs / f"client-{number}.log"
        site.connect(number, ["glusterfs", "-N", "-f", client_file, "-l", log, path])
    site.wait_mounted()
    site.wait_usable()


def _volume(name: str, kind: str, *, below: str = "", **options: object) -> str:
    lines = [f"volume {name}", f"  type {kind}", *(f"  option {key} {value}" for key, value in options.items())]
    return "\n".join([*lines, *([f"  subvolumes {below}"] if below else []), "end-volume", ""])

"""sshfs without ssh: each client talks to an sftp-server of its own, all of them on one folder.

The directory cache, 20 s by default, is 2 s here. It knows nothing of other clients' changes: what it shows is as old.
"""

from __future__ import annotations

import os

from tests.rigs.network_mounts.location import Site

SFTP_SERVER = "/usr/lib/openssh/sftp-server"
CACHE_SECONDS = 2


def start(site: Site) -> None:
    site.mount_disk(64)
    # In place of ssh; its process id is told, so that it can be frozen.
    pids = site.folder / "sftp-pids"
    pids.mkdir()
    command = site.write("sftp", f'#!/bin/sh\n: >"{pids}/$$"\nexec {SFTP_SERVER}\n', mode=0o755)
    cache = f"dcache_timeout={CACHE_SECONDS},dcache_stat_timeout={CACHE_SECONDS},dcache_dir_timeout={CACHE_SECONDS}"
    cache += f",dcache_link_timeout={CACHE_SECONDS}"
    for number, path in enumerate(site.mounts):
        options = f"ssh_command={command},allow_other,default_permissions,{cache}"
        site.connect(number, ["sshfs", "-f", "-o", options, f"server:{site.server}", path])
    site.wait_mounted()
    site.wait_usable()
    site.other_server_pids = [int(name) for name in os.listdir(pids)]

"""``python -m tests.rigs.nfs_emulator BACKING MOUNTPOINT [--settings JSON] [--control SOCKET]``: one client, in the
foreground, until it is unmounted or killed."""

from __future__ import annotations

import sys

from tests.rigs.nfs_emulator.mount import main

sys.exit(main(sys.argv[1:]))

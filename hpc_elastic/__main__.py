"""``python -m hpc_elastic``: the same as the ``hpc-elastic`` command."""

from __future__ import annotations

import sys

from hpc_elastic.cli.main import console_main

if __name__ == "__main__":
    sys.exit(console_main())

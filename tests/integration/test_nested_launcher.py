"""A launcher in a worker gives its ranks a port of its own, and all that it got itself."""

from __future__ import annotations

from pathlib import Path

from hpc_elastic.run.paths import ExitCode
from tests.integration.test_local_run_silent_hangs import installed
from tests.rigs.local_run import LocalRun

_LAUNCHER = """
import os, socket, subprocess, sys
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}
sys.exit(subprocess.call([sys.executable, "CHILD"], env=environ))
"""
_CHILD = """
import datetime
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
print("the child has met", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""


def test_its_ranks_do_not_wait_for_the_agents_store(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(_CHILD)
    script = _LAUNCHER.replace("CHILD", str(child))
    with LocalRun(
        tmp_path, script, nodes=1, options=["--max-restarts", "0"], prelude="", environ=installed(tmp_path)
    ) as run:
        assert run.finish() == ExitCode.OK
        assert "the child has met 1" in run.log()
        assert "the script set MASTER_ADDR/MASTER_PORT itself, to 127.0.0.1:" in run.log()

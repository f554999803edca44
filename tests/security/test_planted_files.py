"""What another user leaves where a victim's agents and commands write or look."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.rigs.two_users import User

_PUT = """
import sys
from pathlib import Path
from hpc_elastic.agent.metrics import open_metrics
from hpc_elastic.run.option_values import parse_metrics
open_metrics(parse_metrics(sys.argv[1]), labels={"host": "n1"}).put("workers.default.healthy", 1)
"""


@pytest.mark.parametrize("kind", ["symlink_to", "hardlink_to"])
def test_metrics_do_not_follow_a_strangers_link(attacker: User, victim: User, shared: Path, kind: str) -> None:
    precious = victim.home / "precious"
    victim.python("open('precious', 'w').write('kept')")
    planted = shared / "n1.prom"
    if kind == "hardlink_to":  # as with fs.protected_hardlinks=0
        planted.hardlink_to(precious)
    else:
        attacker.python("import os, sys; os.symlink(*sys.argv[1:])", precious, planted)
    victim.python(_PUT, f"prometheus:{shared}/{{host}}.prom")
    assert precious.read_text() == "kept"
    planted.unlink()
    precious.unlink()


def test_a_planted_temporary_file_neither_stops_nor_gets_the_prometheus_file(
    attacker: User, victim: User, shared: Path
) -> None:
    # A stranger knows or guesses pids: one FIFO, one file that all may write to, for each of the next pids.
    attacker.python(
        """
        import os, sys
        latest = int(open("/proc/loadavg").read().split()[-1])
        os.umask(0)
        for pid in range(latest, latest + 300):
            path = f"{sys.argv[1]}/.a.prom.{pid}"
            os.mkfifo(path, 0o666) if pid % 2 else open(path, "w").close()
        """,
        shared,
    )
    victim.python(_PUT, f"prometheus:{shared}/a.prom")
    written = shared / "a.prom"
    assert written.stat().st_uid == victim.uid
    assert written.stat().st_mode & 0o777 == 0o644
    assert "healthy" in written.read_text()
    assert not [path for path in shared.iterdir() if os.lstat(path).st_size and path != written]

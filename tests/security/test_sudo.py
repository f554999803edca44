"""Root with a user's HOME, as ``sudo`` may leave it."""

from __future__ import annotations

import dataclasses
import os
import pwd

from tests.rigs.two_users import User

_REMEMBER = """
from pathlib import Path
from hpc_elastic.run import index as run_index
print(run_index.entries("1"))
print(run_index.record(cluster="none", job_id="2", submitted_ns=1, run_dir=Path("/nowhere")))
print(len(run_index.entries("2")))
"""


def test_root_leaves_nothing_in_a_users_home_and_reads_nothing_there(victim: User) -> None:
    victim.python(
        """
        from pathlib import Path
        from hpc_elastic.run import index as run_index
        assert run_index.record(cluster="none", job_id="1", submitted_ns=1, run_dir=Path("/planted")) is None
        """
    )
    sudo = dataclasses.replace(victim, name="root", uid=0, gid=0)
    # In the mount namespace of this command alone, so that the real home of root stays as it is.
    empty_home = ["sh", "-ec", 'mount -t tmpfs x "$0"; exec "$@"', pwd.getpwuid(0).pw_dir]
    done = sudo.run([*empty_home, sudo.interpreter, "-c", _REMEMBER], check=True)
    assert done.stdout.split("\n") == ["[]", "None", "1", ""], done.stderr
    assert [path for path in victim.home.rglob("*") if os.lstat(path).st_uid != victim.uid] == []

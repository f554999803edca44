"""The tier's own ground: two users who can run the project, and can't reach each other's home."""

from __future__ import annotations

from pathlib import Path

from tests.rigs.two_users import User


def test_each_user_runs_the_project_and_reaches_no_other_home(attacker: User, victim: User, shared: Path) -> None:
    for user, other in ((attacker, victim), (victim, attacker)):
        done = user.python(
            """
            import getpass, os, sys, hpc_elastic, psutil, cloudpickle
            assert getpass.getuser() == sys.argv[1] and os.getcwd() == os.path.expanduser("~")
            print(os.access(sys.argv[2], os.R_OK | os.X_OK), os.access(sys.argv[3], os.W_OK))
            """,
            user.name,
            other.home,
            shared,
        )
        assert done.stdout.split() == ["False", "True"]
    assert victim.hpc_elastic("--version").returncode == 0

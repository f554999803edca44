"""Folders of another user that a victim is to work in: refused in one line, with nothing left in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.two_users import User


@pytest.mark.parametrize("mode", ["1777", "777"])
def test_a_strangers_runs_folder_is_refused(attacker: User, victim: User, shared: Path, mode: str) -> None:
    attacker.run(["mkdir", "-m", mode, str(shared / "runs")], check=True)
    victim.python("open('train.py', 'w').write('print(1)')")
    done = victim.hpc_elastic("run", "--cluster", "local", "--runs-dir", shared / "runs", "train.py")
    assert done.returncode == 2
    assert f"belongs to uid {attacker.uid}" in done.stderr
    assert "--runs-dir" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list((shared / "runs").iterdir()) == []


def test_a_sticky_bit_does_not_hold_back_the_owner_of_the_folder(attacker: User, victim: User, shared: Path) -> None:
    """Why it is refused: the kernel lets the attacker move the victim's folder away, and put another in its place."""
    runs = shared / "runs"
    attacker.run(["mkdir", "-m", "1777", str(runs)], check=True)
    victim.run(["mkdir", "-m", "700", str(runs / "run")], check=True)
    attacker.run(["mv", str(runs / "run"), str(runs / "gone")], check=True)
    attacker.run(["mkdir", str(runs / "run")], check=True)


def test_a_strangers_rendezvous_folder_is_refused(attacker: User, victim: User, shared: Path) -> None:
    attacker.run(["mkdir", "-m", "1777", str(shared / "meet")], check=True)
    done = victim.python(
        """
        import sys
        from hpc_elastic.base.clock import SystemClock
        from hpc_elastic.rendezvous.run_folder import RunFolder
        RunFolder(sys.argv[1], "job", prefix="", job="", clock=SystemClock()).enter(1)
        """,
        shared / "meet",
        check=False,
    )
    assert f"UnsafePathError: the rendezvous folder {shared}/meet belongs to uid {attacker.uid}" in done.stderr
    assert list((shared / "meet").iterdir()) == []

"""A victim works in a folder that others may write to: modules that an attacker put there are not imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.two_users import User

_EXECUTOR = """
from hpc_elastic.submission.executor import ElasticExecutor

def train():
    import cloudpickle, json, only_here
    return only_here.__file__

print(ElasticExecutor("{home}/jobs", cluster="local").submit(train).result())
"""


@pytest.fixture
def hostile(attacker: User, shared: Path) -> Path:
    """With modules of names that Python, hpc_elastic and its dependencies import."""
    attacker.python(
        """
        import sys
        from pathlib import Path
        folder = Path(sys.argv[1])
        names = "json os pathlib signal socket runpy pickle typing dataclasses random psutil filelock cloudpickle torch"
        for name in (*names.split(), "sitecustomize", "usercustomize", "hpc_elastic"):
            (folder / f"{name}.py").write_text(f"open('{folder}/attacked-by-' + __name__, 'w')")
        """,
        shared,
        cwd=attacker.home,
    )
    return shared


def attacks(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("attacked-by-*"))


def test_a_run_imports_nothing_from_there(victim: User, hostile: Path) -> None:
    victim.python("open('train.py', 'w').write('import json, psutil; print(7)')")
    runs = victim.home / "runs"
    done = victim.hpc_elastic(
        "run", "--cluster", "local", "--runs-dir", runs, victim.home / "train.py", cwd=hostile, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for command in ("status", "report", "logs"):
        victim.hpc_elastic(command, next(runs.iterdir()), cwd=hostile)
    assert attacks(hostile) == []


def test_an_interpreter_that_is_only_asked_imports_nothing_from_there(victim: User, hostile: Path) -> None:
    """For versions in the job log, whether it has torch, the fork server, the doctor's look at the workers' Python."""
    victim.python("open('train.py', 'w').write('import torch; print(torch.__version__)')")
    wrapper = f"printf '#!/bin/sh\nexec {victim.interpreter} \"$@\"' > other; chmod +x other"
    victim.run(["sh", "-ec", wrapper], check=True)
    options = ["--cluster", "local", "--runs-dir", victim.home / "runs", "--python", victim.home / "other"]
    for more in ([], ["--start-method", "forkserver"]):
        done = victim.hpc_elastic("run", *options, *more, victim.home / "train.py", cwd=hostile, timeout=120)
        assert done.returncode == 0, done.stderr
    victim.hpc_elastic("doctor", "--nodes", "1", *options, cwd=hostile, timeout=240)
    assert attacks(hostile) == []


def test_a_submitted_function_imports_it_last(victim: User, hostile: Path) -> None:
    """As under ``python -m``, modules of the working directory are found; but they hide nothing."""
    victim.python("import sys; open(sys.argv[1], 'w').close()", hostile / "only_here.py", cwd=victim.home)
    program = _EXECUTOR.format(home=victim.home)
    victim.python("import sys; open('submit.py', 'w').write(sys.argv[1])", program)
    done = victim.run([victim.interpreter, str(victim.home / "submit.py")], cwd=hostile, timeout=90)
    assert done.stdout.strip().endswith("only_here.py"), done.stderr
    assert attacks(hostile) == []

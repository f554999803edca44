"""Configuration files that another user leaves above a victim's working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.two_users import User

EVIL = "python = '/evil/python'\n"
# Root owns /proc/PID of a process that can't be dumped; what stands in its cmdline, the process itself wrote.
_LIAR = f"""
import ctypes, signal
words = open("/proc/self/stat", "rb").read().rpartition(b")")[2].split()
start, end = int(words[45]), int(words[46])
text = {EVIL.encode()!r}
ctypes.memmove(start, text + b"#" * (end - start - len(text)), end - start)
assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0
print(flush=True)
signal.pause()
"""
_EXCHANGE = """
import ctypes, sys
renameat2 = ctypes.CDLL(None).renameat2
one, other = (path.encode() for path in sys.argv[1:])
assert renameat2(-100, one, -100, other, 2) == 0
print(flush=True)
while renameat2(-100, one, -100, other, 2) == 0:
    pass
"""
_RESOLVE = """
import os, time
from pathlib import Path
from hpc_elastic.options.run_request import ALL_OPTIONS
from hpc_elastic.options.table import Parsed
from hpc_elastic.options.resolve import resolve
from hpc_elastic.errors import UsageError
refused, deadline = 0, time.monotonic() + 2
while time.monotonic() < deadline:
    try:
        found = resolve(Parsed(values={}, sources={}, command=()), ALL_OPTIONS, env={}, here=Path.cwd())
        assert found.parsed.get("python") is None, found
    except UsageError as error:
        refused += "configuration not read: " in str(error)
print(refused)
"""


@pytest.fixture
def here(victim: User, shared: Path) -> Path:
    """A folder of the victim's below one that the attacker writes to."""
    victim.run(["mkdir", str(shared / "work")], check=True)
    return shared / "work"


@pytest.fixture
def liar(attacker: User) -> Iterator[Path]:
    """A file of root's with the attacker's words in it."""
    with attacker.popen([attacker.interpreter, "-c", _LIAR]) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            found = Path("/proc", str(process.pid), "cmdline")
            assert found.stat().st_uid == 0
            assert found.read_text().startswith(EVIL)
            yield found
        finally:
            process.kill()


def put(user: User, path: Path, text: str) -> None:
    user.python("import sys; open(sys.argv[1], 'w').write(sys.argv[2])", path, text)


def link(user: User, path: Path, target: Path) -> None:
    user.python("import os, sys; os.symlink(*sys.argv[1:])", target, path)


def refused(victim: User, here: Path, **env: str) -> str:
    done = victim.hpc_elastic("config", "python", cwd=here, env=env)
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("\n") == 1
    assert "/evil" not in done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize("name", ["hpc_elastic.toml", "pyproject.toml"])
def test_a_strangers_file_is_refused_whosever_the_folder_is(
    attacker: User, victim: User, here: Path, name: str, shared: Path
) -> None:
    text = EVIL if name == "hpc_elastic.toml" else f"[tool.hpc-elastic]\n{EVIL}"
    os.chown(shared, attacker.uid, attacker.gid)
    put(attacker, shared / name, text)
    said = refused(victim, here)
    assert f"{shared / name} belongs to uid {attacker.uid}, not to you (uid {victim.uid})" in said
    assert victim.hpc_elastic("config", "python", cwd=here, env={"HPC_ELASTIC_PROJECT_CONFIG": ""}).returncode == 0
    named = {"HPC_ELASTIC_PROJECT_CONFIG": str(shared / name)}
    assert "/evil/python" in victim.hpc_elastic("config", "python", cwd=here, env=named).stdout


def test_a_strangers_link_to_a_file_of_roots_that_the_stranger_writes(
    attacker: User, victim: User, here: Path, shared: Path, liar: Path
) -> None:
    link(attacker, shared / "hpc_elastic.toml", liar)
    assert f"is a symbolic link that belongs to uid {attacker.uid}" in refused(victim, here)


def test_two_names_that_are_exchanged_all_the_time(attacker: User, victim: User, here: Path, shared: Path) -> None:
    """A file of root's and the attacker's own: that the first was judged does not have the second one read."""
    good, evil = shared / "hpc_elastic.toml", shared / "other"
    good.write_text("nodes = 1\n")
    put(attacker, evil, EVIL)
    with attacker.popen([attacker.interpreter, "-c", _EXCHANGE, str(good), str(evil)]) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert int(victim.python(_RESOLVE, cwd=here).stdout) > 0
            assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.parametrize("name", ["hpc_elastic.toml", "pyproject.toml"])
def test_a_fifo_is_not_waited_for(attacker: User, victim: User, here: Path, shared: Path, name: str) -> None:
    attacker.run(["mkfifo", str(shared / name)], check=True)
    assert f"{shared / name} is not a regular file" in refused(victim, here)


def test_a_strangers_file_is_not_parsed(attacker: User, victim: User, here: Path, shared: Path) -> None:
    """20 kB that take 400 MB: nothing is said of what is in it."""
    put(attacker, shared / "hpc_elastic.toml", "a" + ".a" * 10_000 + " = 1\n")
    assert f"belongs to uid {attacker.uid}" in refused(victim, here)
    put(attacker, shared / "pyproject.toml", "a" + ".a" * 10_000 + " = 1\n")
    (shared / "hpc_elastic.toml").unlink()
    assert victim.hpc_elastic("config", "python", cwd=here).returncode == 0, "it does not mention us"


def test_root_obeys_roots_files_alone(victim: User, here: Path, shared: Path) -> None:
    put(victim, here / "hpc_elastic.toml", EVIL)
    assert "/evil/python" in victim.hpc_elastic("config", "python", cwd=here).stdout
    source = "import sys; from hpc_elastic.cli.main import main; sys.exit(main(['config', 'python']))"
    for env in ({}, {"HPC_ELASTIC_PROJECT_CONFIG": str(here / "hpc_elastic.toml")}):
        done = subprocess.run(
            [sys.executable, "-c", source],
            cwd=here,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **env},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert f"belongs to uid {victim.uid}, not to you (uid 0); root reads root's own" in done.stderr


def test_the_file_that_decides_what_is_executed_is_shown(victim: User, here: Path) -> None:
    put(victim, here / "hpc_elastic.toml", "python = 'python3'\nhealth-check = 'true'\n")
    put(victim, here / "train.py", "")
    for cluster in ("slurm", "local"):
        done = victim.hpc_elastic(
            "submit", "--cluster", cluster, "--allow-local-runs-dir", "--dry-run", "train.py", cwd=here
        )
        assert done.returncode == 0, done.stderr
        assert f"hpc-elastic: {here}/hpc_elastic.toml:1: python = python3\n" in done.stderr
        assert f"hpc-elastic: {here}/hpc_elastic.toml:2: health-check = true\n" in done.stderr

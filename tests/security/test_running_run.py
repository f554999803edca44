"""A victim's run on a node that the attacker is on too: its packets, its files, its processes, its heartbeats."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_elastic.run.paths import RunPaths
from tests.rigs.event_pairs import read_events
from tests.rigs.slurm_cluster.processes import wait_until
from tests.rigs.two_users import TwoUsers, User

_TRAIN = """
import os, sys, time
import hpc_elastic

while not os.path.exists(sys.argv[1]):
    hpc_elastic.heartbeat(step=1)
    time.sleep(0.1)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimsRun:
    """Two nodes with a worker each, on this machine; the run's folder lies where the attacker can go."""

    paths: RunPaths
    process: subprocess.Popen[str]
    stop: Path

    def count(self, event: str) -> int:
        return [each["event"] for each in read_events(self.paths.attempt(0).events)].count(event)


@pytest.fixture(scope="module")
def run(users: TwoUsers) -> Iterator[VictimsRun]:
    victim, folder = users.victim, users.shared / "victims"
    victim.run(["mkdir", "-m", "755", str(folder)], check=True)
    victim.python("import sys; open('train.py', 'w').write(sys.argv[1])", _TRAIN)
    stop = victim.home / "stop"
    command = ["hpc-elastic", "run", "--cluster", "local", "--nodes", "2", "--runs-dir", str(folder), "--run-id", "r"]
    process = victim.popen(
        [*command, "train.py", str(stop)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={"SECRET": "kept"}
    )
    found = VictimsRun(paths=RunPaths(folder / "r"), process=process, stop=stop)
    try:
        wait_until(lambda: found.count("workers_started") == 2, timeout=30, what="the victim's workers run")
        yield found
    finally:
        process.kill()
        process.wait()
        victim.kill_all()
        shutil.rmtree(folder)
        stop.unlink(missing_ok=True)


def test_forged_packets_from_another_user_change_nothing(attacker: User, run: VictimsRun) -> None:
    """The ports are known to all, from /proc/net/udp; the secret is not."""
    done = attacker.python(
        """
        import hashlib, hmac, json, os, socket, sys, time
        victim = int(sys.argv[1])
        rows = [line.split() for line in open("/proc/net/udp").readlines()[1:]]
        ports = [int(row[1].split(":")[1], 16) for row in rows if int(row[7]) == victim]
        def sealed(body, key):
            return hmac.digest(key, body, "sha256") + body
        def body(kind, port, **more):
            said = {"u": "evil", "k": kind, "c": 1 << 40, "to": "127.0.0.1", "p": port, **more}
            return json.dumps(said).encode()
        keys = [b"", bytes(32), hashlib.sha256(b"").digest()]
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        end, sent = time.monotonic() + 4, 0
        while time.monotonic() < end:
            for port in ports:
                for key in keys:
                    for forged in (body("ring", port, a="log/999999"), body("beat", port, h=0), os.urandom(500)):
                        sock.sendto(sealed(forged, key), ("127.0.0.1", port))
                        sent += 1
            time.sleep(0.001)  # the machine is the victim's too
        print(len(ports), sent)
        """,
        run.paths.root.stat().st_uid,
    )
    ports, sent = map(int, done.stdout.split())
    assert ports >= 2
    assert sent > 1000
    assert run.process.poll() is None
    assert run.count("workers_started") == 2, "both in the first round"
    assert run.count("node_lost") == 0


def test_nothing_of_a_run_can_be_read_by_another_user(attacker: User, victim: User, run: VictimsRun) -> None:
    shared_memory = [path for path in Path("/dev/shm").iterdir() if path.stat().st_uid == victim.uid]
    assert shared_memory, "the heartbeats"
    everything = [run.paths.root, *run.paths.root.rglob("*")]
    for folder in shared_memory:
        everything += [folder, *folder.rglob("*")]
    pids = victim.pids()
    assert len(pids) > 4
    done = attacker.python(
        """
        import json, os, sys
        paths, pids = json.load(open(sys.argv[1]))
        opened = []
        for path in [*paths, *(f"/proc/{pid}/environ" for pid in pids), *(f"/proc/{pid}/mem" for pid in pids)]:
            for flags in (os.O_RDONLY, os.O_RDWR):
                try:
                    os.close(os.open(path, flags | os.O_NONBLOCK))
                    opened.append(path)
                except OSError:
                    pass
        for pid in pids:
            try:
                os.kill(pid, 0)
                opened.append(pid)
            except PermissionError:
                pass
        print(opened)
        """,
        _facts(attacker, [list(map(str, everything)), pids]),
    )
    assert done.stdout.strip() == "[]"
    modes = {path: path.lstat().st_mode & 0o077 for path in everything if not path.is_symlink()}
    assert not any(modes.values()), modes


@pytest.mark.parametrize("command", ["status", "report", "logs", "cancel", "requeue"])
def test_commands_on_anothers_run_say_so_in_one_line(attacker: User, run: VictimsRun, command: str) -> None:
    done = attacker.hpc_elastic(command, run.paths.root)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert str(run.paths.root) in done.stderr
    assert run.process.poll() is None


def test_the_run_ends_well_after_all_that(run: VictimsRun) -> None:
    run.stop.touch()
    assert run.process.wait(60) == 0


def _facts(user: User, value: object) -> Path:
    path = user.home / "facts.json"
    path.write_text(json.dumps(value))
    path.chmod(0o644)
    return path

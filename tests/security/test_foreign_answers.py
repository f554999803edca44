"""What another user answers, dumps and saves in a run's place: none of it is believed, waited for, or taken whole."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.rigs import fake_ras
from tests.rigs.two_users import User

_RAS = f"""{Path(fake_ras.__file__).read_text()}
import json, sys
ranks = [{{"rank": n, "host": "n0", "pid": 1, "collective_counts": {{"AllReduce": 9 - n}}}} for n in range(2)]
with FakeRas(lambda: json.dumps({{"communicators": [{{"size": 2, "ranks": ranks}}]}})) as server:
    print(server.address[1], flush=True)
    sys.stdin.read()
"""
_ASK = """
import sys
from hpc_elastic.agent.nccl_watch import NotOursError
from hpc_elastic.agent.nccl_watch import NcclWatch
from hpc_elastic.base.clock import SystemClock
watch = NcclWatch(f"127.0.0.1:{sys.argv[1]}", run_uid="run", least=300.0, clock=SystemClock())
try:
    print("believed", watch._read(watch._address, [], 2).communicators)
except NotOursError as error:
    print(error)
"""


def test_another_user_is_no_ras_of_the_workers(attacker: User, victim: User) -> None:
    for server, says in (
        (attacker, f"is not this run's: a process of uid {attacker.uid} listens there"),
        (victim, "b"),
    ):
        listening = [server.interpreter, "-c", _RAS]
        with server.popen(listening, stdin=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdin is not None
            port = process.stdout.readline().strip()
            assert says in victim.python(_ASK, port).stdout
            process.stdin.close()


_READ = """
import os, sys
from pathlib import Path
from hpc_elastic.agent.flight_recorders import FlightRecorders
from hpc_elastic.base.clock import SystemClock
os.makedirs("own", exist_ok=True)
recorders = FlightRecorders(Path("own"), round_index=0, clock=SystemClock())
recorders.environment(0, {"TORCH_FR_DUMP_TEMP_FILE": sys.argv[1]})
print("ready", flush=True)
sys.stdin.readline()
print("read", recorders.read(0, Path("own")))
"""


@pytest.mark.parametrize("planted", ["dump", "FIFO", "link"])
def test_a_dump_that_another_user_planted_where_the_users_variable_says_is_none(
    attacker: User, victim: User, shared: Path, planted: str
) -> None:
    place = shared / "dump-0"
    with victim.popen([victim.interpreter, "-c", _READ, str(shared / "dump-")], stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        dump = (
            '{"version": "2.4", "rank": 0, "entries": [{"profiling_name": "nccl:all_reduce", "collective_seq_id": 7}]}'
        )
        if planted == "FIFO":
            attacker.run(["mkfifo", "-m", "666", str(place)], check=True)
        else:
            file = place if planted == "dump" else attacker.home / "dump"
            attacker.python("import sys; open(sys.argv[1], 'w').write(sys.argv[2])", file, dump)
        if planted == "link":
            attacker.run(["chmod", "755", str(attacker.home)], check=True)
            attacker.run(["ln", "-s", str(attacker.home / "dump"), str(place)], check=True)
        out, error = process.communicate("go\n", timeout=60)
    assert out == "read None\n", error


_WHOLE = "import sys; from hpc_elastic.integrations import last_whole_checkpoint as f; print(f(sys.argv[1]))"


@pytest.mark.parametrize(
    "plant",
    [
        "mkfifo step=9.ckpt",
        "ln -s /dev/zero step=9.ckpt",
        "ln -s /dev/tty step=9.pt",
        "mkdir step=9; mkfifo step=9/trainer_state.json; touch step=9/a.pt",
        "mkdir step=9; truncate -s 4T step=9/config.json; echo x > step=9/a.pt",
        r"printf '\377\377\377\377\377\3\0\0' > step=9.safetensors; truncate -s 4T step=9.safetensors",
        r"printf '\11\0\0\0\0\0\0\0[1, 2, 3]' > step=9.safetensors",
    ],
)
def test_what_another_user_planted_is_no_whole_checkpoint(
    attacker: User, victim: User, shared: Path, plant: str
) -> None:
    attacker.run(["sh", "-ec", f"umask 0; {plant}"], cwd=shared, check=True)
    began = time.monotonic()
    done = victim.run(
        ["sh", "-c", 'ulimit -v 2000000; exec "$0" "$@"', victim.interpreter, "-c", _WHOLE, str(shared)], timeout=120
    )
    assert done.stdout == "None\n", done.stderr
    assert time.monotonic() - began < 60

"""`LocalElasticAgent` over the rendezvous on files: a spare, a death in the exit barrier, how the run is closed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

from hpc_elastic.agent import LocalElasticAgent, WorkerSpec
from hpc_elastic.base.clock import SystemClock
from hpc_elastic.rendezvous.claims import read_claims
from hpc_elastic.rendezvous.handler import FileRendezvousHandler
from hpc_elastic.rendezvous.handler_config import HandlerConfig, RunFolder, config_from_url
from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.run.paths import Outcome
from hpc_elastic.store.file_store import FileStore
from tests.rigs.waiting import until

PATIENCE = 60.0


class Seen:
    """The rendezvous of the id ``run`` in a folder, as its store shows it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.url = f"fs://{folder}/run"
        self._run = RunFolder(
            HandlerConfig(directory=str(folder), run_id="run", min_nodes=1, max_nodes=1), SystemClock()
        )

    @property
    def store(self) -> FileStore:
        return self._run.open(1)

    def newest(self) -> RoundRecord | None:
        return self._run.latest(1)

    def done(self) -> set[str]:
        return set(read_claims(self.store, 0).get("done", ()))


class Asked(FileRendezvousHandler):
    """Counts how often its agent has asked whether the round is over."""

    times = 0

    def round_is_over(self) -> bool:
        self.times += 1
        return super().round_is_over()


def test_a_spare_that_waits_has_nobody_restarted(tmp_path: Path) -> None:
    seen, go = Seen(tmp_path / "rdzv"), tmp_path / "go"
    url = f"{seen.url}?min_workers=1&max_workers=1&timeout={PATIENCE:g}&poll_interval=0.2"
    handler, spare = Asked(config_from_url(url)), FileRendezvousHandler(config_from_url(url))

    def wait_for_go() -> str:
        while not go.exists():
            time.sleep(0.02)
        return os.environ["TORCHELASTIC_RESTART_COUNT"]

    def wait_as_a_spare() -> None:
        try:
            spare.next_rendezvous()
        except Exception:
            pass  # the run is closed before there is a place
        finally:
            spare.withdraw()

    def say_go() -> None:
        try:
            until(lambda: (record := seen.newest()) is not None and record.status is Status.FINAL, seconds=PATIENCE)
            waiting.start()
            until(lambda: (record := seen.newest()) is not None and record.waiting == 1, seconds=PATIENCE)
            before = handler.times
            until(lambda: handler.times >= before + 5, seconds=PATIENCE)
        finally:
            go.touch()

    waiting, teller = threading.Thread(target=wait_as_a_spare), threading.Thread(target=say_go)
    teller.start()
    spec = WorkerSpec("default", 1, wait_for_go, (), handler, max_restarts=0, monitor_interval=0.05)
    assert LocalElasticAgent(spec, log_dir=tmp_path / "logs").run()[0] == "0"
    teller.join()
    waiting.join()
    record = seen.newest()
    assert record is not None
    assert (record.round, record.outcome) == (0, Outcome.SUCCEEDED), record


_NODE = """
import os, sys, time
from pathlib import Path
from hpc_elastic.agent import LocalElasticAgent, WorkerSpec
from hpc_elastic.rendezvous.handler import FileRendezvousHandler
from hpc_elastic.rendezvous.handler_config import config_from_url

def work(path):
    while path and not Path(path).exists():
        time.sleep(0.02)
    return os.environ["TORCHELASTIC_RESTART_COUNT"]

handler = FileRendezvousHandler(config_from_url(sys.argv[1]))
spec = WorkerSpec("default", 1, work, (sys.argv[2],), handler, max_restarts=0, monitor_interval=0.1)
print(list(LocalElasticAgent(spec).run().return_values.values()))
"""


def test_a_node_that_dies_in_the_exit_barrier_is_not_missed(tmp_path: Path) -> None:
    """Though there are no more nodes than are needed: its work is done."""
    seen, go = Seen(tmp_path / "rdzv"), tmp_path / "go"
    program = tmp_path / "node.py"
    program.write_text(textwrap.dedent(_NODE))
    times = "heartbeat_ttl=3&heartbeat_interval=0.2&poll_interval=0.2&doorbell=off"
    url = f"{seen.url}?min_workers=2&max_workers=2&timeout={PATIENCE:g}&{times}"
    first, last = (
        subprocess.Popen([sys.executable, str(program), url, path], stdout=subprocess.PIPE, text=True)
        for path in ("", str(go))
    )
    try:
        until(lambda: len(seen.done()) == 1, seconds=PATIENCE)
        (lost,) = seen.done()
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        record = seen.newest()
        assert record is not None
        (other,) = {member.uid for member in record.members} - {lost}
        # By the heartbeats of the one that lives: three times as long as the dead one's holds.
        beats: set[object] = set()

        def has_lived_on() -> bool:
            beats.add(seen.store.version(f"hb/{other}"))
            return len(beats) > 45

        until(has_lived_on, seconds=PATIENCE)
        go.touch()
        told, _ = last.communicate(timeout=PATIENCE)
    finally:
        for node in (first, last):
            node.kill()
            node.wait()
    assert (last.returncode, told.splitlines()[-1:]) == (0, ["['0']"])
    record = seen.newest()
    assert record is not None
    assert (record.round, record.status, record.outcome) == (0, Status.CLOSED, Outcome.SUCCEEDED)

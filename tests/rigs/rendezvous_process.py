"""A rendezvous handler in a process of its own, to be killed: tells each round that it is in, a JSON object a line.

``python -m tests.rigs.rendezvous_process CONFIG`` with the fields of `HandlerConfig` as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from hpc_elastic.rendezvous.handler import FileRendezvousHandler
from hpc_elastic.rendezvous.handler_config import HandlerConfig
from hpc_elastic.rendezvous.state import RendezvousClosedError
from hpc_elastic.run.spec import RendezvousSettings

ROOT = Path(__file__).resolve().parents[2]


def main(text: str) -> int:
    fields = json.loads(text)
    fields["settings"] = RendezvousSettings(**fields["settings"])
    fields["addresses"] = tuple(fields["addresses"])
    config = HandlerConfig(**fields)
    handler = FileRendezvousHandler(config, open_master=lambda: f"{config.host}:1")
    try:
        while True:
            found = handler.next_rendezvous()
            found.store.set(f"rank {found.rank}", str(config.node).encode())
            first = found.store.get_waiting("rank 0", 60)
            _say(version=found.version, rank=found.rank, world_size=found.world_size, first=int(first))
            while not handler.round_is_over():
                time.sleep(0.05)
    except RendezvousClosedError:
        _say(closed=True)
    return 0


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class Nodes:
    """Some of these processes."""

    def __init__(self, configs: Sequence[HandlerConfig], folder: Path) -> None:
        self._folder = folder
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        for config in configs:
            assert config.node is not None
            with open(self._output(config.node), "wb") as output:
                argv = [sys.executable, "-m", "tests.rigs.rendezvous_process", json.dumps(to_builtins(config))]
                self.processes[config.node] = subprocess.Popen(
                    argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                )

    def _output(self, node: int) -> Path:
        return self._folder / f"node-{node}.out"

    def said(self, node: int) -> list[Mapping[str, Any]]:
        lines = self._output(node).read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def wait(self, condition: Callable[[], bool], what: str, *, seconds: float) -> float:
        """Returns the seconds that it took."""
        began = time.monotonic()
        while not condition():
            told = {node: self._output(node).read_text()[-1500:] for node in self.processes}
            assert time.monotonic() - began < seconds, (what, told)
            time.sleep(0.02)
        return time.monotonic() - began

    def wait_for_round(self, members: set[int], *, seconds: float) -> float:
        """Until exactly these are in one round, each in a rank of its own. Returns the seconds that it took."""

        def is_there() -> bool:
            newest = [(self.said(node) or [{}])[-1] for node in members]
            ranks = sorted(found.get("rank", -1) for found in newest)
            alike = {(found.get("version"), found.get("world_size"), found.get("first")) for found in newest}
            return ranks == list(range(len(members))) and len(alike) == 1 and newest[0]["world_size"] == len(members)

        return self.wait(is_there, f"a round of {sorted(members)}", seconds=seconds)

    def kill(self, node: int) -> None:
        os.kill(self.processes[node].pid, signal.SIGKILL)
        self.processes[node].wait()


@contextmanager
def nodes(configs: Sequence[HandlerConfig], folder: Path) -> Iterator[Nodes]:
    started = Nodes(configs, folder)
    try:
        yield started
    finally:
        for process in started.processes.values():
            process.kill()
            process.wait()


def leader(directory: Path) -> int:
    """The node of the coordinator, from the newest record of the only run under `directory`."""
    (log,) = directory.glob("*/epoch-*/log")
    newest = max(name for name in os.listdir(log) if name.isdecimal())
    value = json.loads(os.readlink(log / newest).partition(" ")[2])
    return int(value["leader"].partition("-")[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""What tests use: a network filesystem with several clients, in a ``with``."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.rigs.network_mounts.kinds import KINDS, Kind
from tests.rigs.network_mounts.leftovers import PREFIX, remove_leftovers, write_owner
from tests.rigs.network_mounts.location import RigError, cut, remove
from tests.rigs.network_mounts.prerequisites import missing_prerequisites, require_mounts

ROOT = Path(__file__).resolve().parents[3]
START_SECONDS = 300.0


class NetworkMounts:
    """`mounts` clients of one server; `paths` are where they are mounted.

    At the end of the ``with`` no process, mount or file is left; see the package for what happens where this process is
    killed.
    """

    def __init__(self, kind: str, *, mounts: int = 2) -> None:
        self.kind: Kind = KINDS[kind]
        self.paths: list[Path] = []
        self._count = mounts
        self._folder: Path | None = None
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> NetworkMounts:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self) -> None:
        """Begin to bring it up, without waiting for it. Whoever calls this calls `__exit__`."""
        remove_leftovers()
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        os.chmod(self._folder, 0o755)
        with open(self._folder / "keeper.log", "wb") as log:
            self._keeper = subprocess.Popen(
                keeper_command(self.kind.name, self._folder, mounts=self._count),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        write_owner(self._folder, owner=os.getpid(), keeper=self._keeper.pid)

    def wait_ready(self) -> None:
        if not self.paths:
            self.paths = [Path(path) for path in self._hear(START_SECONDS)["mounts"]]

    def __exit__(self, *_: object) -> None:
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            assert self._keeper.stdout is not None
            self._keeper.stdin.close()
            try:
                self._keeper.wait(60)
            except subprocess.TimeoutExpired:
                self._keeper.kill()  # and with it, by the kernel, all that it started
                self._keeper.wait()
            self._keeper.stdout.close()
        if self._folder is not None:
            remove(self._folder)

    @property
    def keeper(self) -> int:
        """The pid of the process whose end is everybody's."""
        assert self._keeper is not None
        return self._keeper.pid

    @property
    def server_disk(self) -> Path:
        assert self._folder is not None
        return self._folder / "server"

    def freeze(self, client: int | None = None) -> None:
        """Stop the server's processes, or those of one client: whoever asks for something there waits."""
        self._tell("freeze" if client is None else f"freeze {client}")

    def thaw(self, client: int | None = None) -> None:
        self._tell("thaw" if client is None else f"thaw {client}")

    def cut(self) -> None:
        """End all clients' mounts, and whatever waits in them, where the filesystem has come to a stop for good."""
        cut(self.paths)

    def logs(self) -> str:
        return str(self._tell("logs")["logs"])

    def _tell(self, command: str) -> dict[str, Any]:
        assert self._keeper is not None
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(f"{command}\n".encode())
        self._keeper.stdin.flush()
        return self._hear(120.0)

    def _hear(self, seconds: float) -> dict[str, Any]:
        assert self._keeper is not None
        assert self._keeper.stdout is not None
        ready, _, _ = select.select([self._keeper.stdout], [], [], seconds)
        line = self._keeper.stdout.readline() if ready else b""
        answer: dict[str, Any] = json.loads(line) if line.strip() else {"error": f"no answer: {self._keeper_log()}"}
        if "error" in answer:
            raise RigError(f"{self.kind.name}: {answer['error']}")
        return answer

    def _keeper_log(self) -> str:
        assert self._folder is not None
        try:
            return (self._folder / "keeper.log").read_text(errors="replace")[-2000:]
        except OSError as error:  # its start has failed before, and it was taken down
            return str(error)


def keeper_command(kind: str, folder: Path, *, mounts: int, until_signal: bool = False) -> list[str]:
    """The command line of a keeper, which will be process number 1 of its namespaces."""
    argv = ["unshare", "--pid", "--net", "--fork", "--kill-child", "--", sys.executable]
    argv += ["-m", "tests.rigs.network_mounts", "keep", kind, str(folder), "--mounts", str(mounts)]
    return [*argv, "--until-signal"] if until_signal else argv


@contextmanager
def started_together() -> Iterator[Callable[[str], NetworkMounts]]:
    """All filesystems that can run here, brought up at the same time; gives what waits for one of them.

    A test that asks for one that can't run is skipped, or failed in CI.
    """
    with ExitStack() as stack:
        started = {}
        for kind in KINDS:
            if not missing_prerequisites(kind):
                started[kind] = NetworkMounts(kind)
                stack.push(started[kind].__exit__)
                started[kind].start()

        def wait_for(kind: str) -> NetworkMounts:
            require_mounts(kind)
            started[kind].wait_ready()
            return started[kind]

        yield wait_for

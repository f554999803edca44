"""What tests submit: functions that tell where they are by files, and wait for a word."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from submitit.helpers import Checkpointable, DelayedSubmission

from hpc_elastic.worker_api.heartbeat import notice_is_there
from tests.rigs.processes import is_alive

PATIENCE = 120.0


def rank() -> int:
    return int(os.environ["RANK"])


def wait_for(path: Path, what: str = "a word") -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come: {path}")
        time.sleep(0.02)


def touch(folder: Path, name: str) -> None:
    (folder / name).touch()


class Saved(Checkpointable):
    """Each rank's state is its own. Goes on when it hears the word `go`, or at once in its second life."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lives: list[tuple[int, int]] = []

    def __call__(self, word: str) -> list[tuple[int, int]]:
        self.lives.append((rank(), len(self.lives)))
        touch(self.folder, f"begun-{rank()}-{len(self.lives)}")
        if len(self.lives) < 2:
            wait_for(self.folder / word)
        return self.lives

    def checkpoint(self, *args: Any, **kwargs: Any) -> DelayedSubmission:
        touch(self.folder, f"saved-{rank()}")
        return super().checkpoint(*args, **kwargs)


def outlives_its_return(folder: Path) -> bool:
    """Rank 1 returns when rank 0's result is there, and long enough after for a process that is not held to end."""
    pid = folder / "pid"
    if rank() == 0:
        pid.with_name("new").write_text(str(os.getpid()))
        pid.with_name("new").rename(pid)
        return True
    while not pid.exists():
        time.sleep(0.01)
    time.sleep(1.5)
    return is_alive(int(pid.read_text()))


class OddError(Exception):
    """No copy of it can be made by pickle."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"odd {first} {second}")


def killed_once(folder: Path) -> int:
    if rank() == 0 and not (folder / "killed").exists():
        touch(folder, "killed")
        os.kill(os.getpid(), signal.SIGKILL)
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def raises(error: Exception) -> None:
    print("called", flush=True)
    try:
        raise error
    except ValueError as problem:
        raise KeyError("key") from problem


def raises_odd() -> None:
    raise OddError(1, 2)


def sleeps(folder: Path) -> None:
    touch(folder, f"sleeping-{rank()}")
    time.sleep(PATIENCE)


def sleeps_once(folder: Path) -> str:
    if os.environ["HPC_ELASTIC_ATTEMPT"] == "0":
        sleeps(folder)
    return "came back"


def speaks_to(stream: int) -> str:
    os.write(stream, b"said\n")
    return os.environ.get("FROM_SETUP", "")


def is_done_under_a_notice(place: Path) -> int:
    """Asks whether to save after its first steps, gets the signal, and has no more to do."""
    import hpc_elastic

    (place / f"begun-{os.environ['RANK']}-{os.environ['HPC_ELASTIC_ATTEMPT']}").touch()
    assert os.environ["HPC_ELASTIC_ATTEMPT"] == "0", "no second notice would come"
    while not notice_is_there():
        assert not hpc_elastic.should_checkpoint(3)
        time.sleep(0.01)
    time.sleep(1.0)  # the signal comes
    assert not hpc_elastic.should_checkpoint(3)
    return 4

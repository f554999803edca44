"""Checkpoints through the nodes beside those that are written straight to the shared filesystem.

Four nodes of this machine with one rank each, over one mount of the NFS emulator with little bandwidth. The ranks wait
for each other after each save, as training does.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import tempfile
from pathlib import Path

from tests.bench.table import Number
from tests.rigs import lockstep
from tests.rigs.local_run import LocalRun
from tests.rigs.nfs_emulator import MountSettings, NfsEmulator

NODES = 4
STEP_SECONDS = 0.1
OVERHEAD = 0.1
"""Of the training's time, for saves: the interval between them follows from what one costs."""

_MAIN = """
import statistics
import sys
import hpc_elastic

stalls = []
DATA = os.urandom(1_000_000)
READ = bytearray(len(DATA))
PEERS = connect(240.0)


def barrier():
    all_reduce(PEERS, 0, 0)


def timed(what, action):
    barrier()
    began = time.monotonic()
    action()
    barrier()
    seconds = time.monotonic() - began
    print(f"{{what}}: {{seconds:.4f}} s", flush=True)
    return seconds


def write(folder):
    with open(folder / f"rank{{RANK}}", "wb") as file:
        for _ in range({size} // len(DATA)):
            file.write(DATA)
        file.flush()
        os.fsync(file.fileno())


def save(step):
    with hpc_elastic.checkpoint_dir(step) as folder:
        write(folder)


def read(folder):
    with open(folder / f"rank{{RANK}}", "rb", buffering=0) as file:
        while file.readinto(READ):
            pass


found = hpc_elastic.latest_checkpoint()
if found is None:
    Path({direct!r}).mkdir(exist_ok=True)
    for step in range({times}):
        timed("direct", lambda: write(Path({direct!r})))
        stalls.append(timed("through", lambda: save(step)))
        deadline = time.monotonic() + 900
        while not (Path({saved!r}) / f"step-{{step}}" / "hpc-elastic-index.json").exists():
            if time.monotonic() > deadline:
                sys.exit("not committed")
            time.sleep(0.2)
    print("measured", flush=True)
else:
    timed("read-node", lambda: read(found))
    shared = all_reduce(PEERS, int(max(Path({saved!r}).glob("step-*"), key=os.path.getmtime).name[5:]) * (RANK == 0), 0)
    timed("read-shared", lambda: read(Path({saved!r}) / f"step-{{shared[0]}}"))
step = int(found.name[5:]) if found else {times} - 1
print(f"begins at {{step}}", flush=True)
if found is None and RANK == 0:
    interval = statistics.median(stalls) / {overhead} / {step_seconds}
    Path("every").write_text(str(max(1, round(interval))))
barrier()
every = int(Path("every").read_text())
while not os.path.exists("end"):
    step += 1
    barrier()
    time.sleep({step_seconds})
    if step % every == 0:
        save(step)
    if RANK == 0:
        print(f"step {{step}}", flush=True)
    if all_reduce(PEERS, os.path.exists("end"), 0)[0]:
        break
"""


def measure(*, quick: bool) -> list[Number]:
    size, times, kills, bandwidth = (2_000_000, 2, 1, 5e6) if quick else (1_000_000_000, 2, 3, 1e8)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        backing = Path(folder, "server")
        backing.mkdir()
        with NfsEmulator(backing, mounts=1, settings=MountSettings(bandwidth=bandwidth)) as server:
            found, lost = _run(Path(folder), server.paths[0], size=size, times=times, kills=kills)
    ratios = {
        what: [one / statistics.median(found[beside]) for one in found[what]]
        for what, beside in (("through", "direct"), ("read-node", "read-shared"))
    }
    interval = statistics.median(found["direct"]) / OVERHEAD / STEP_SECONDS
    note = f"{NODES} × {size / 1e6:.0f} MB over {bandwidth / 1e6:.0f} MB/s"
    straight = statistics.median(found["direct"])
    return [
        Number(title="a save straight to the server", unit="s", values=found["direct"], note=note),
        Number(title="a save through the nodes: training stands still", unit="s", values=found["through"]),
        Number(title="… ÷ straight", unit="×", values=ratios["through"], goal=0.1),
        Number(
            title=f"steps lost by a killed worker ÷ straight, at {OVERHEAD:.0%} overhead",
            unit="×",
            values=[one / (interval / 2) for one in lost],
            goal=0.2,
            note=f"straight: half of the {interval:.0f} steps between two saves of {straight:.1f} s",
        ),
        Number(title="a restart that reads the shared copy", unit="s", values=found["read-shared"]),
        Number(title="… the node's own ÷ shared", unit="×", values=ratios["read-node"], goal=0.2),
    ]


def _run(folder: Path, shared: Path, *, size: int, times: int, kills: int) -> tuple[dict[str, list[float]], list[int]]:
    script = Path(lockstep.__file__).read_text().partition('if __name__ == "__main__":')[0] + _MAIN.format(
        size=size,
        times=times,
        overhead=OVERHEAD,
        step_seconds=STEP_SECONDS,
        direct=str(shared / "direct"),
        saved=str(shared / "saved"),
    )
    place = folder / "run"
    place.mkdir()
    options = ["--checkpoint-dir", str(shared / "saved"), "--checkpoint-keep", "3", "--max-restarts", str(kills + 1)]
    options += ["--checkpoint-local", f"/dev/shm:{3 * size + (64 << 20)}"]
    lost = []
    with LocalRun(place, script, nodes=NODES, nproc=1, options=options) as run:
        for number in range(kills):
            begun = f"begins at {times - 1}" if number == 0 else ""
            run.until(lambda: len(re.findall(r"begins at", run.log())) >= NODES * (number + 1), begun, within=600)  # noqa: B023
            # Each is killed at another moment between two saves.
            every = int(run.until(lambda: (place / "every").exists() and (place / "every").read_text(), "interval"))
            begun_at = int(re.findall(r"begins at (\d+)", run.log())[-1])
            wanted = (begun_at // every + 1) * every + int(every * (number + 0.5) / kills)
            run.until(lambda: f" step {wanted}\n" in run.log(), f"step {wanted}", within=600)  # noqa: B023
            pids = next(e["pids"] for e in run.events("workers_started") if (e["round"], e["node"]) == (number, 1))
            os.kill(pids[0], signal.SIGKILL)
            begins = NODES * (number + 2)
            run.until(lambda: len(re.findall(r"begins at", run.log())) >= begins, "a restart", within=600)  # noqa: B023
            steps = [int(step) for step in re.findall(r"(?m) step (\d+)$", run.log())]
            again = int(re.findall(r"begins at (\d+)", run.log())[-1])
            last = max(step for step in steps)
            lost.append(max(0, last - again))
        (place / "end").touch()
        run.finish(within=600)
    found: dict[str, list[float]] = {}
    for what, seconds in re.findall(r"(direct|through|read-node|read-shared): ([\d.]+) s", run.log()):
        found.setdefault(what, []).append(float(seconds))
    return found, lost

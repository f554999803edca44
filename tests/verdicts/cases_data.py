"""Data loading: workers that are killed or raise, corrupt files, shared memory, uneven shards."""

from __future__ import annotations

import os
import signal

from tests.rigs.local_run import LocalRun
from tests.verdicts.case import ENVIRON, GLOO, MEET, Case, pid_of

GROUP = "data loading"
_LOADER = (
    GLOO
    + """\
from torch.utils.data import DataLoader, Dataset
class Tokens(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 9:
            trouble()
        return torch.zeros(4)
"""
)
_LOOP = """\
for batch in DataLoader(Tokens(), batch_size=4, num_workers=1{options}):
    dist.all_reduce(batch)
time.sleep(60)
"""


def _trouble(rank: int, lines: str, options: str = "") -> str:
    """A script whose data loader's worker has a trouble on one rank."""
    body = "".join(f"        {line}\n" for line in lines.splitlines())
    return f"{_LOADER}def trouble():\n    if rank == {rank}:\n{body}{_LOOP.format(options=options)}"


def _kill_loader(run: LocalRun) -> None:
    os.kill(pid_of(run, 2, name="loader"), signal.SIGKILL)


CASES = (
    Case(
        "loader-worker-killed",
        GROUP,
        _trouble(1, "os.kill(os.getpid(), 9)"),
        ranks=(1,),
        says=("DataLoader worker",),
    ),
    Case(
        "loader-worker-killed-from-outside",
        GROUP,
        _trouble(2, 'open("loader-2", "w").write(str(os.getpid()))\ntime.sleep(60)'),
        ranks=(2,),
        says=("DataLoader worker",),
        act=_kill_loader,
    ),
    Case(
        "loader-worker-raises",
        GROUP,
        _trouble(3, 'raise ValueError("sample 9: label 1001 is not below 1000")'),
        ranks=(3,),
        says=("label 1001 is not below 1000",),
    ),
    Case(
        # Mistaken at first: the class stood in the function, so that the error never came out of the loader's worker.
        "loader-worker-raises-own-type",
        GROUP,
        """\
class CorruptSample(Exception):
    def __init__(self, path, offset):
        super().__init__(f"{path}: bad magic at {offset}")
"""
        + _trouble(0, 'raise CorruptSample("shard-0007.tar", 4096)'),
        ranks=(0,),
        says=("shard-0007.tar: bad magic at 4096",),
    ),
    Case(
        # The loader's worker prints why it cannot send its error, and rank 0 waits for a batch for ever.
        "loader-worker-cannot-send-its-error",
        GROUP,
        _LOADER
        + """\
group = dist.new_group(timeout=timedelta(seconds=5))
def trouble():
    class BadSample(Exception):
        pass
    if rank == 0:
        raise BadSample("sample 9")
for batch in DataLoader(Tokens(), batch_size=4, num_workers=1):
    dist.all_reduce(batch, group=group)
time.sleep(60)
""",
        ranks=(0,),
        says=("Can't pickle local object",),
        unknown_is_right=True,
    ),
    Case(
        "loader-timeout",
        GROUP,
        _trouble(2, "time.sleep(60)", options=", timeout=3"),
        ranks=(2,),
        says=("DataLoader timed out after 3 seconds",),
    ),
    Case(
        "shared-memory-too-small",
        GROUP,
        GLOO
        + """\
from torch.utils.data import DataLoader
data = torch.zeros(64, 300_000)
for batch in DataLoader(data, batch_size=4, num_workers=1 if rank == 2 else 0):
    dist.all_reduce(batch[0, :2].clone())
time.sleep(60)
""",
        ranks=(2,),
        says=("shared memory", "/dev/shm", "Bus error"),
        not_says=("disk",),
        command=("--no-python", "./launch.sh"),
        files={
            "launch.sh": """\
#!/bin/bash
if [ "$RANK" = 2 ]; then
    exec unshare -m sh -c 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec python3 -u train.py'
fi
exec python3 -u train.py
"""
        },
    ),
    Case(
        # Mistaken at first: torch 2.13 puts it as an invalid argument, where it found no central directory before.
        "truncated-archive",
        GROUP,
        GLOO
        + """\
if rank == 3:
    torch.save(torch.zeros(10_000), "features.pt")
    os.truncate("features.pt", 9_000)
    torch.load("features.pt")
dist.all_reduce(torch.ones(2))
""",
        ranks=(3,),
        says=("failed finding central directory", "OSError: [Errno 22] Invalid argument"),
    ),
    Case(
        "bad-json-line",
        GROUP,
        ENVIRON
        + MEET
        + """\
import json
lines = ['{"text": "a"}'] * 20 + ['{"text": "b" "meta": 1}']
for line in lines if rank == 0 else ():
    json.loads(line)
time.sleep(60)
""",
        ranks=(0,),
        says=("Expecting ',' delimiter",),
    ),
    Case(
        "uneven-shards",
        GROUP,
        GLOO
        + """\
samples = torch.arange(96 if rank == 2 else 128)
for step in range(128):
    value = samples[step].float().reshape(1)
    dist.all_reduce(value)
time.sleep(60)
""",
        ranks=(2,),
        says=("index 96 is out of bounds",),
    ),
    Case(
        "too-many-open-files",
        GROUP,
        ENVIRON
        + MEET
        + """\
import resource
if rank == 1:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    shards = [open(__file__) for shard in range(100)]
time.sleep(60)
""",
        ranks=(1,),
        says=("Too many open files",),
    ),
    Case(
        "undecodable-text",
        GROUP,
        ENVIRON
        + MEET
        + """\
with open(f"part-{rank}.txt", "wb") as file:
    file.write(b"caf\\xe9 au lait" if rank == 3 else b"tea")
open(f"part-{rank}.txt", encoding="utf-8").read()
time.sleep(60)
""",
        ranks=(3,),
        says=("'utf-8' codec can't decode byte 0xe9",),
    ),
    Case(
        "locked-database",
        GROUP,
        ENVIRON
        + MEET
        + """\
import sqlite3
if rank == 0:
    first, second = (sqlite3.connect("index.db", timeout=0.2, isolation_level=None) for _ in range(2))
    first.execute("begin exclusive")
    second.execute("create table seen (id int)")
time.sleep(60)
""",
        ranks=(0,),
        says=("database is locked",),
    ),
    Case(
        "prefetch-pipe-in-words-of-a-symptom",
        GROUP,
        GLOO
        + """\
class Prefetcher:
    def get(self, step):
        if rank == 1 and step == 3:
            raise RuntimeError("prefetch pipe broken: socket closed while the shuffle buffer held 0 of 512 samples")
        return torch.ones(4)
for step in range(8):
    dist.all_reduce(Prefetcher().get(step))
time.sleep(60)
""",
        ranks=(1,),
        says=("prefetch pipe broken",),
    ),
    Case(
        "read-of-a-closed-file",
        GROUP,
        GLOO
        + """\
index = open(__file__, "rb")
if rank == 0:
    index.close()
dist.all_reduce(torch.tensor([float(len(index.read()))]))
time.sleep(60)
""",
        ranks=(0,),
        says=("closed file",),
    ),
)

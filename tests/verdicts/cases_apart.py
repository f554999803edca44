"""Ranks that go their own way, victims that hide what they lost, and what comes in a later round."""

from __future__ import annotations

from tests.verdicts.case import ENVIRON, GLOO, MEET, TORCH, Case

GROUP = "ranks apart"
PLAIN = ENVIRON + MEET
SHORT = (
    TORCH
    + """\
dist.init_process_group("gloo", timeout=timedelta(seconds=120))
group = dist.new_group(timeout=timedelta(seconds=4))
dist.barrier()
"""
)
"""All ranks have met; `group` gives up after 4 s."""

CASES = (
    Case(
        "bad-batch-is-logged-and-skipped",
        GROUP,
        SHORT
        + """\
import logging
for step in range(6):
    try:
        if rank == 1 and step == 3:
            raise ValueError("batch 3 has 0 tokens")
        dist.all_reduce(torch.ones(1), group=group)
    except ValueError:
        logging.exception("skipped")
time.sleep(20)
""",
        ranks=(1,),
        unknown_is_right=True,
    ),
    Case(
        "one-batch-more-on-one-rank",
        GROUP,
        GLOO
        + """\
for step in range(4 if rank == 3 else 3):
    dist.all_reduce(torch.ones(1))
""",
        ranks=(0, 1, 2, 3),
        unknown_is_right=True,
    ),
    Case(
        "receives-from-a-rank-that-sends-nothing",
        GROUP,
        SHORT
        + """\
if rank == 2:
    dist.recv(torch.ones(1), src=1)
dist.all_reduce(torch.ones(1), group=group)
""",
        ranks=(2,),
        unknown_is_right=True,
    ),
    Case(
        "imports-from-a-slow-filesystem",
        GROUP,
        TORCH
        + """\
if rank == 1:
    import slowpackage
dist.init_process_group("gloo", timeout=timedelta(seconds=6))
dist.barrier()
""",
        ranks=(1,),
        unknown_is_right=True,
        files={"slowpackage.py": "import time\ntime.sleep(90)\n"},
    ),
    Case(
        "thread-keeps-a-finished-rank-alive",
        GROUP,
        SHORT
        + """\
import threading
def heartbeat():
    while True:
        time.sleep(0.2)
if rank == 2:
    threading.Thread(target=heartbeat).start()
else:
    dist.barrier(group=group)
""",
        ranks=(2,),
        unknown_is_right=True,
    ),
    Case(
        "event-loop-waits-for-a-dead-task",
        GROUP,
        SHORT
        + """\
import asyncio
async def read(queue):
    raise ValueError("record 12 has no length")
async def main():
    queue = asyncio.Queue()
    task = asyncio.create_task(read(queue))
    await queue.get()
if rank == 1:
    asyncio.run(main())
dist.barrier(group=group)
""",
        ranks=(1,),
        unknown_is_right=True,
    ),
    Case(
        "victims-raise-their-own-error-from-none",
        GROUP,
        GLOO
        + """\
class TrainingFailed(Exception):
    pass
def sync():
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        raise TrainingFailed("gradient sync failed at step 12") from None
for step in range(20):
    if rank == 1 and step == 12:
        os._exit(0)
    sync()
time.sleep(20)
""",
        ranks=(1,),
        unknown_is_right=True,
    ),
    Case(
        "victims-log-and-exit-with-3",
        GROUP,
        GLOO
        + """\
import logging
try:
    for step in range(20):
        if rank == 0 and step == 8:
            {}["cosine"]
        dist.all_reduce(torch.ones(1))
except RuntimeError as error:
    logging.error("step failed: %s", error)
    sys.exit(3)
""",
        ranks=(0,),
        says=("KeyError: 'cosine'",),
    ),
    Case(
        "own-sockets-closed",
        GROUP,
        GLOO
        + """\
for step in range(50):
    if rank == 2 and step == 10:
        os.closerange(3, 200)  # "daemonise"
    dist.all_reduce(torch.ones(1))
""",
        ranks=(2,),
        unknown_is_right=True,
    ),
    Case(
        "two-of-four-assert-alike",
        GROUP,
        GLOO
        + """\
for step in range(20):
    assert not (step == 7 and rank in (1, 3)), "sequence of 8193 tokens"
    dist.all_reduce(torch.ones(1))
""",
        ranks=(1, 3),
        says=("sequence of 8193 tokens",),
    ),
    Case(
        "slow-node-and-a-short-timeout",
        GROUP,
        SHORT
        + """\
for step in range(3):
    if rank >= 2 and step == 1:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            sum(range(1000))  # a throttled processor
    dist.all_reduce(torch.ones(1), group=group)
""",
        ranks=(2, 3),
        unknown_is_right=True,
    ),
    Case(
        "crash-after-the-work-is-done",
        GROUP,
        GLOO
        + """\
import ctypes
dist.destroy_process_group()
print("done", flush=True)
if rank == 0:
    ctypes.string_at(0)
""",
        ranks=(0,),
        says=("SIGSEGV", "Segmentation fault"),
    ),
    Case(
        "main-returns-its-metrics",
        GROUP,
        PLAIN
        + """\
def main():
    return {"loss": 0.1}
sys.exit(main())
""",
        ranks=(0, 1, 2, 3),
        says=("{'loss': 0.1}",),
    ),
    Case(
        "quit-from-outside",
        GROUP,
        PLAIN
        + """\
import signal
if rank == 2:
    os.kill(os.getpid(), signal.SIGQUIT)
time.sleep(60)
""",
        ranks=(2,),
        says=("SIGQUIT",),
    ),
    Case(
        "lock-left-by-the-round-before",
        GROUP,
        PLAIN
        + """\
if rank == 2:
    os.close(os.open("run.lock", os.O_CREAT | os.O_EXCL))
    time.sleep(0.5)
    os.kill(os.getpid(), 9)
time.sleep(60)
""",
        ranks=(2,),
        says=("File exists: 'run.lock'",),
        options=("--max-restarts", "1"),
    ),
    Case(
        "survives-two-failures-of-two-ranks",
        GROUP,
        PLAIN
        + """\
tried = len([name for name in os.listdir(".") if name.startswith("tried-")])
time.sleep(0.5)
if tried < 2 and rank == 1 + tried:
    open(f"tried-{tried}", "w").close()
    raise OSError(5, "flaky storage") if tried else ConnectionError("flaky storage gateway")
""",
        ranks=(1, 2),
        says=("flaky storage",),
        options=("--max-restarts", "2"),
        succeeds=True,
    ),
    Case(
        "message-with-control-characters",
        GROUP,
        PLAIN
        + """\
if rank == 3:
    raise ValueError("\\x1b[2J\\rbad header \\x00\\x07 in \\u202eshard")
time.sleep(60)
""",
        ranks=(3,),
        says=("bad header",),
    ),
    Case(
        "remote-task-error-with-its-own-traceback",
        GROUP,
        PLAIN
        + """\
class RayTaskError(Exception):
    pass
RayTaskError.__qualname__ = "RayTaskError(ValueError)"
if rank == 0:
    raise RayTaskError('''ray::tokenize() (pid=4711, ip=10.0.0.7)
  File "/home/u/prep.py", line 4, in tokenize
    raise ValueError("bad fold 7")
ValueError: bad fold 7''')
time.sleep(60)
""",
        ranks=(0,),
        says=("bad fold 7",),
    ),
    Case(
        "java-error-in-a-python-message",
        GROUP,
        PLAIN
        + """\
class Py4JJavaError(Exception):
    pass
if rank == 1:
    raise Py4JJavaError('''An error occurred while calling o45.load.
: java.io.FileNotFoundException: File hdfs://nn/data/part-7 does not exist.
\\tat org.apache.hadoop.hdfs.DistributedFileSystem.listStatus(DistributedFileSystem.java:904)
\\tat java.base/java.lang.Thread.run(Thread.java:829)
''')
time.sleep(60)
""",
        ranks=(1,),
        says=("java.io.FileNotFoundException",),
    ),
    Case(
        "python-home-is-wrong",
        GROUP,
        PLAIN + "time.sleep(60)\n",
        ranks=(2, 3),
        says=("encodings", "init_fs_encoding"),
        command=["--no-python", "./start.sh"],
        files={
            "start.sh": '#!/bin/bash\n[ "$GROUP_RANK" = 1 ] && export PYTHONHOME=/opt/none\nexec python3 train.py\n'
        },
    ),
    Case(
        "binary-of-another-machine",
        GROUP,
        PLAIN + "time.sleep(60)\n",
        ranks=(0, 1, 2, 3),
        says=("Exec format error", "cannot execute"),
        command=["--no-python", "./start.sh"],
        files={"start.sh": '#!/bin/bash\nprintf "\\x7fELFbroken" > tool$RANK\nchmod +x tool$RANK\n./tool$RANK\n'},
    ),
    Case(
        "own-monitor-thread-ends-a-victim",
        GROUP,
        GLOO
        + """\
import threading
progress = [time.monotonic()]
def monitor():
    while time.monotonic() - progress[0] < 4:
        time.sleep(0.1)
    print("monitor: no progress for 4 s, ending this process", file=sys.stderr, flush=True)
    os._exit(1)
if rank == 0:
    threading.Thread(target=monitor, daemon=True).start()
for step in range(6):
    if rank == 3 and step == 4:
        time.sleep(90)  # a stalled filesystem
    dist.all_reduce(torch.ones(1))
    progress[0] = time.monotonic()
""",
        ranks=(3,),
        unknown_is_right=True,
    ),
    Case(
        "bad-data-seen-by-all-made-by-one",
        GROUP,
        GLOO
        + """\
loss = torch.tensor([float("nan") if rank == 2 else 1.0])
if not torch.isfinite(loss).all():
    print(f"rank {rank}: loss is {loss.item()} in batch 17", file=sys.stderr, flush=True)
dist.all_reduce(loss)
assert torch.isfinite(loss).all(), "mean loss is not finite"
""",
        # Each rank fails alike: which one made the value is in its own words alone.
        ranks=(0, 1, 2, 3),
        says=("mean loss is not finite",),
    ),
)

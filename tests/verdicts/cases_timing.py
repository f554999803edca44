"""The first failure that is seen is not the cause: a rank lives on after its error, raises late, or is slow."""

from __future__ import annotations

from tests.verdicts.case import ENVIRON, GLOO, MEET, Case
from tests.verdicts.cases_peers import SHORT

GROUP = "timing"

CASES = (
    Case(
        "lives-on-after-logging-its-error",
        GROUP,
        GLOO
        + """\
import logging
log = logging.getLogger("trainer")

def main():
    table = {"train": 1, "val": 2}
    for step in range(40):
        if rank == 2 and step == 8:
            table["tset"]
        dist.all_reduce(torch.ones(4))

try:
    main()
except Exception:
    log.exception("training failed")
    dist.destroy_process_group()
    time.sleep(3)  # waits for the experiment tracker
    sys.exit(1)
""",
        # On the other ranks the same handler logs the lost connection.
        ranks=(2,),
        says=("KeyError: 'tset'",),
    ),
    Case(
        "main-thread-dead-pusher-lives",
        GROUP,
        SHORT
        + """\
import threading

def push_metrics():
    for _ in range(80):
        time.sleep(0.1)

threading.Thread(target=push_metrics).start()
for step in range(40):
    if rank == 0 and step == 5:
        raise ValueError("loss scale fell below 1e-8 at step 5")
    dist.all_reduce(torch.ones(4), group=steps)
""",
        ranks=(0,),
        says=("loss scale fell below 1e-8",),
    ),
    Case(
        "raises-late-after-leaving-the-group",
        GROUP,
        GLOO
        + """\
def export(path):
    time.sleep(0.6)  # traces the model
    return open(path)

for step in range(5):
    dist.all_reduce(torch.ones(4))
if rank == 3:
    dist.destroy_process_group()
    export("templates/serving-v2.json")
dist.all_reduce(torch.ones(4))
""",
        ranks=(3,),
        says=("serving-v2.json",),
    ),
    Case(
        "stopped-after-it-printed-its-error",
        GROUP,
        SHORT
        + """\
import atexit

@atexit.register
def flush_profile():
    time.sleep(20)

def accumulate(batches):
    return 512 // len(batches)

for step in range(40):
    accumulate([] if rank == 1 and step == 6 else [1, 2])
    dist.all_reduce(torch.ones(4), group=steps)
""",
        ranks=(1,),
        says=("ZeroDivisionError",),
    ),
    Case(
        "two-errors-half-a-second-apart",
        GROUP,
        ENVIRON
        + MEET
        + """\
def parse(line):
    name, value = line.split("=")
    return float(value)

start = os.path.getmtime("here-0")
if rank == 0:
    time.sleep(0.4)
    parse("momentum:0.9")
if rank == 2:
    time.sleep(0.9)
    raise RuntimeError("tokenizer server answered 503")
time.sleep(60)
""",
        ranks=(0,),
        says=("not enough values to unpack",),
    ),
    Case(
        "two-errors-at-once",
        GROUP,
        ENVIRON
        + MEET
        + """\
go = max(os.path.getmtime(f"here-{other}") for other in range(world)) + 0.5
while time.time() < go:
    pass
if rank == 1:
    raise LookupError("no bucket for length 8192")
if rank == 2:
    raise ArithmeticError("gradient norm is inf")
time.sleep(60)
""",
        ranks=(1, 2),
        says=("no bucket for length 8192", "gradient norm is inf"),
    ),
    Case(
        "slow-rank-fails-after-the-others-timeouts",
        GROUP,
        SHORT
        + """\
def read_shard(path):
    time.sleep(4.5 if rank == 3 else 0.1)  # the filesystem is slow there, then fails
    with open(path, "rb") as file:
        return file.read()

for shard in range(3):
    if rank == 3 and shard == 1:
        read_shard("shards/train-00001-of-00003.tar")
    dist.all_reduce(torch.ones(4), group=steps)
""",
        # Where the job stops it before it raises, its place is what can be known.
        ranks=(3,),
        unknown_is_right=True,
    ),
    Case(
        "thread-dies-and-main-waits",
        GROUP,
        SHORT
        + """\
import queue, threading

batches = queue.Queue(maxsize=2)

def prefetch():
    for index in range(100):
        if rank == 1 and index == 4:
            raise UnicodeError("record 4: invalid start byte 0xff")
        batches.put(torch.full((4,), float(index)))

threading.Thread(target=prefetch, daemon=True).start()
for step in range(20):
    batch = batches.get()
    dist.all_reduce(batch, group=steps)
""",
        ranks=(1,),
        says=("record 4: invalid start byte",),
    ),
    Case(
        "handlers-of-the-stop-raise",
        GROUP,
        GLOO
        + """\
import signal

class Preempted(Exception):
    pass

def on_term(number, frame):
    raise Preempted("SIGTERM received, a checkpoint is due")

signal.signal(signal.SIGTERM, on_term)
if rank == 2:
    time.sleep(0.5)
    raise TypeError("collate got NoneType for field 'labels'")
while True:
    time.sleep(0.05)
""",
        ranks=(2,),
        says=("collate got NoneType",),
    ),
    Case(
        "cleanup-fails-after-the-loss",
        GROUP,
        GLOO
        + """\
def save(path):
    with open(path, "wb") as file:
        file.write(b"state")

try:
    for step in range(60):
        if rank == 3 and step == 20:
            assert step < 20, "the curriculum has 20 stages"
        dist.all_reduce(torch.ones(4))
except RuntimeError:
    save(f"emergency/{rank}/state.pt")
    raise
""",
        ranks=(3,),
        says=("the curriculum has 20 stages",),
    ),
    Case(
        "barrier-in-the-handler-hides-the-error",
        GROUP,
        SHORT
        + """\
def train():
    for step in range(10):
        if rank == 1 and step == 4:
            raise NotImplementedError("rope scaling 'yarn' is not supported")
        dist.all_reduce(torch.ones(1000), group=steps)

try:
    train()
except NotImplementedError:
    dist.barrier(group=steps)  # so that all ranks see the error together
    raise
""",
        # Its traceback ends with the barrier's timeout, and begins with the cause. The first expectation had no text:
        # the timeout of rank 1 alone would have counted as right.
        ranks=(1,),
        says=("rope scaling 'yarn'",),
        not_says=("Timed out",),
    ),
    Case(
        "old-logged-error-is-not-the-cause",
        GROUP,
        GLOO
        + """\
import logging
logging.basicConfig()
if rank == 0:
    try:
        open("cache/index.json")
    except OSError:
        logging.exception("no index cache, building one")
for step in range(40):
    if rank == 3 and step == 25:
        [1, 2, 3][step]
    dist.all_reduce(torch.ones(4))
""",
        ranks=(3,),
        says=("list index out of range",),
        not_says=("index.json",),
    ),
    Case(
        "retries-then-fails",
        GROUP,
        SHORT
        + """\
import traceback

def fetch(url):
    for attempt in range(3):
        try:
            raise PermissionError(13, "token expired", url)
        except PermissionError as error:
            traceback.print_exc()
            last = error
            time.sleep(0.2)
    raise SystemExit(f"giving up after 3 attempts: {last}")

for step in range(10):
    if rank == 0 and step == 3:
        fetch("s3://corpus/part-3")
    dist.all_reduce(torch.ones(4), group=steps)
""",
        ranks=(0,),
        says=("giving up after 3 attempts", "token expired"),
    ),
    Case(
        "dies-while-the-others-still-import",
        GROUP,
        ENVIRON
        + """\
if rank == 2:
    import configparser
    configparser.ConfigParser().read_string("lr = 0.1")
time.sleep(1.5)
import torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=8))
dist.barrier()
""",
        ranks=(2,),
        says=("File contains no section headers",),
    ),
)

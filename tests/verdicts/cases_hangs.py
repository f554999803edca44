"""A rank that does not come: it waits for something else, or computes without end. Timeouts of gloo, or of sections."""

from __future__ import annotations

from tests.verdicts.case import ENVIRON, GLOO, MEET, TORCH, Case
from tests.verdicts.cases_peers import SHORT

GROUP = "hangs"

_BEATS = "import hpc_elastic\n"

CASES = (
    Case(
        "lock-taken-twice",
        GROUP,
        SHORT
        + """\
import threading

class Writer:
    def __init__(self):
        self.lock = threading.Lock()

    def flush(self):
        with self.lock:
            pass

    def write(self, step):
        with self.lock:
            if step == 4:
                self.flush()

writer = Writer()
for step in range(10):
    if rank == 2:
        writer.write(step)
    dist.all_reduce(torch.ones(4), group=steps)
""",
        ranks=(2,),
        unknown_is_right=True,
    ),
    Case(
        "asks-on-stdin",
        GROUP,
        SHORT
        + """\
if rank == 0 and not os.path.exists("out"):
    answer = input("output folder is missing, create it? [y/n] ")
dist.barrier(group=steps)
""",
        ranks=(0,),
        says=("EOFError",),
    ),
    Case(
        "breakpoint-left-in",
        GROUP,
        SHORT
        + """\
def loss_of(step):
    if rank == 1 and step == 3:
        breakpoint()
    return torch.ones(1)

for step in range(6):
    dist.all_reduce(loss_of(step), group=steps)
""",
        ranks=(1,),
        says=("BdbQuit",),
    ),
    Case(
        "waits-for-a-subprocess",
        GROUP,
        SHORT
        + """\
import subprocess
if rank == 1:
    subprocess.run(["sleep", "300"])  # unpacks the data set
dist.barrier(group=steps)
""",
        ranks=(1,),
        unknown_is_right=True,
    ),
    Case(
        "loader-worker-stuck",
        GROUP,
        SHORT
        + """\
from torch.utils.data import DataLoader, Dataset

class Images(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        if rank == 3 and index == 9:
            time.sleep(300)  # a read that does not return
        return torch.ones(4)

if __name__ == "__main__":
    for batch in DataLoader(Images(), batch_size=4, num_workers=1):
        dist.all_reduce(batch, group=steps)
""",
        ranks=(3,),
        unknown_is_right=True,
    ),
    Case(
        "waits-for-a-key-nobody-sets",
        GROUP,
        SHORT
        + """\
store = dist.distributed_c10d._get_default_store()
if rank == 1:
    store.wait(["tokenizer-ready"], timedelta(seconds=200))
for step in range(3):
    dist.all_reduce(torch.ones(4), group=steps)
""",
        ranks=(1,),
        unknown_is_right=True,
    ),
    Case(
        "stopped-by-sigstop",
        GROUP,
        SHORT
        + """\
import signal
for step in range(20):
    if rank == 2 and step == 5:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(4), group=steps)
""",
        ranks=(2,),
        unknown_is_right=True,
    ),
    Case(
        "section-timeout-in-a-step",
        GROUP,
        GLOO
        + _BEATS
        + """\
def preprocess(step):
    if rank == 1 and step == 5:
        time.sleep(300)

for step in range(20):
    hpc_elastic.heartbeat(step=step)
    preprocess(step)
    dist.all_reduce(torch.ones(4))
""",
        ranks=(1,),
        says=("no heartbeat",),
        options=("--section-timeouts", "setup:60,step:4"),
    ),
    Case(
        "section-timeout-of-another-rank-behind",
        GROUP,
        GLOO
        + _BEATS
        + """\
def sync(step):
    dist.all_reduce(torch.ones(4))

for step in range(20):
    sync(step)
    if rank == 3 and step == 6:
        while not os.path.exists("resume-token"):  # rank 0 writes it elsewhere
            time.sleep(0.01)
    hpc_elastic.heartbeat(step=step)
""",
        # The others are in the next step's all_reduce, and have reported one step more.
        ranks=(3,),
        says=("no heartbeat",),
        options=("--section-timeouts", "setup:60,step:4"),
    ),
    Case(
        "hangs-before-the-first-step",
        GROUP,
        TORCH
        + _BEATS
        + """\
if rank == 0:
    os.mkfifo("barrier.fifo")
    open("barrier.fifo").read()  # nobody writes
dist.init_process_group("gloo", timeout=timedelta(seconds=90))
hpc_elastic.heartbeat(step=0)
""",
        ranks=(0,),
        options=("--section-timeouts", "setup:10,step:10"),
        # All four are silent in setup from the start; the three others' stacks are in init_process_group.
        unknown_is_right=True,
    ),
    Case(
        "hangs-in-the-checkpoint",
        GROUP,
        GLOO
        + _BEATS
        + """\
def save(step):
    with hpc_elastic.section("checkpoint"):
        if rank == 2:
            with open("ready") as file:
                while not file.read(1):
                    time.sleep(0.05)
        dist.barrier()

for step in range(4):
    hpc_elastic.heartbeat(step=step)
    if step == 2:
        save(step)
""",
        files={"ready": ""},
        ranks=(2,),
        options=("--section-timeouts", "setup:60,step:30,checkpoint:4"),
        # All four sit in the section of the same step: the stacks show which one is in no collective.
        unknown_is_right=True,
    ),
    Case(
        "regular-expression-without-end",
        GROUP,
        SHORT
        + """\
import re
PATTERN = re.compile(r"(\\w+\\s?)+$")

def clean(text):
    return PATTERN.sub("", text)

for step in range(5):
    if rank == 3 and step == 2:
        clean("a" * 60 + "!")  # the interpreter's lock is held all the time
    dist.all_reduce(torch.ones(4), group=steps)
""",
        ranks=(3,),
        unknown_is_right=True,
    ),
    Case(
        "two-ranks-receive-from-each-other",
        GROUP,
        SHORT
        + """\
token = torch.zeros(1)
if rank == 0:
    dist.recv(token, src=1, group=steps)
    dist.send(token, dst=1, group=steps)
elif rank == 1:
    dist.recv(token, src=0, group=steps)
    dist.send(token, dst=0, group=steps)
else:
    time.sleep(60)
""",
        ranks=(0, 1),
        says=("recv",),
        unknown_is_right=True,
    ),
    Case(
        "queue-of-a-dead-child",
        GROUP,
        SHORT
        + """\
import multiprocessing

def produce(queue):
    for index in range(3):
        queue.put(index)
    os._exit(0)  # its last item was never flushed

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    if rank == 0:
        context.Process(target=produce, args=(queue,), daemon=True).start()
    for index in range(6):
        if rank == 0:
            queue.get()
        dist.all_reduce(torch.ones(4), group=steps)
""",
        ranks=(0,),
        unknown_is_right=True,
    ),
    Case(
        "file-lock-held-elsewhere",
        GROUP,
        SHORT
        + """\
import fcntl, subprocess
if rank == 1:
    held = open("cache.lock", "w")
    fcntl.flock(held, fcntl.LOCK_EX)  # as a stale process of an earlier job holds it
    if os.path.exists("cache.lock"):
        fcntl.flock(open("cache.lock", "w"), fcntl.LOCK_EX)
dist.barrier(group=steps)
""",
        ranks=(1,),
        unknown_is_right=True,
    ),
    Case(
        "no-torch-one-rank-sleeps",
        GROUP,
        ENVIRON
        + _BEATS
        + MEET
        + """\
def wait_for_others(step):
    open(f"step-{step}-{rank}", "w").close()
    while not all(os.path.exists(f"step-{step}-{other}") for other in range(world)):
        time.sleep(0.01)

def download():
    if rank == 2:
        time.sleep(300)

for step in range(10):
    hpc_elastic.heartbeat(step=step)
    if step == 3:
        download()
    wait_for_others(step)
""",
        ranks=(2,),
        # Without a collective of a library, three ranks' stacks are alike and one is not.
        options=("--section-timeouts", "setup:60,step:4"),
        unknown_is_right=True,
    ),
)

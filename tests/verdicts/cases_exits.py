"""Ends that a script brings about in odd places: hooks, threads, ``atexit``, alarms, odd exit codes, odd exceptions."""

from __future__ import annotations

from tests.verdicts.case import ENVIRON, GLOO, MEET, TORCH, Case

GROUP = "hooks, threads, exits"
PLAIN = ENVIRON + MEET

CASES = (
    Case(
        "tensor-hook-raises",
        GROUP,
        GLOO
        + """\
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(4, 4))
def check(grad):
    if rank == 1:
        raise ValueError("gradient of the head has norm 0 at step 3")
    return grad
for step in range(50):
    hidden = model(torch.ones(2, 4))
    hidden.register_hook(check)
    hidden.sum().backward()
""",
        ranks=(1,),
        says=("gradient of the head has norm 0",),
    ),
    Case(
        "communication-hook-raises",
        GROUP,
        GLOO
        + """\
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(4, 4))
def compress(state, bucket):
    if rank == 3:
        raise TypeError("powersgd state has no error buffer for bucket 0")
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda fut: fut.value()[0])
model.register_comm_hook(None, compress)
for step in range(50):
    model(torch.ones(2, 4)).sum().backward()
""",
        ranks=(3,),
        says=("powersgd state has no error buffer",),
    ),
    Case(
        "own-backward-raises",
        GROUP,
        GLOO
        + """\
from torch.nn.parallel import DistributedDataParallel
class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        if rank == 2:
            return grad.view(7, -1)
        return grad * 2
model = DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(50):
    Clip.apply(model(torch.ones(2, 4))).sum().backward()
""",
        ranks=(2,),
        says=("shape '[7, -1]' is invalid",),
    ),
    Case(
        "anomaly-mode-finds-a-nan",
        GROUP,
        GLOO
        + """\
x = torch.zeros(3, requires_grad=True)
torch.autograd.set_detect_anomaly(True)
for step in range(50):
    (torch.sqrt(x) * (0.0 if rank == 0 else 1.0)).sum().backward() if rank == 0 else None
    dist.all_reduce(torch.ones(1))
""",
        ranks=(0,),
        says=("SqrtBackward0",),
    ),
    Case(
        "atexit-sets-another-code",
        GROUP,
        PLAIN
        + """\
import atexit
def flush():
    if rank == 1:
        print("ERROR: 3 of 410 metrics were not written", file=sys.stderr, flush=True)
        os._exit(9)
atexit.register(flush)
if rank != 1:
    time.sleep(60)
""",
        ranks=(1,),
        says=("3 of 410 metrics were not written",),
    ),
    Case(
        "thread-hook-ends-the-process",
        GROUP,
        PLAIN
        + """\
import threading, traceback
def hook(args):
    print(f"thread {args.thread.name} died: {args.exc_value!r}", file=sys.stderr, flush=True)
    os._exit(70)
threading.excepthook = hook
def push():
    raise LookupError("no replica holds block 77")
if rank == 3:
    threading.Thread(target=push, name="pusher", daemon=True).start()
time.sleep(60)
""",
        ranks=(3,),
        says=("no replica holds block 77",),
    ),
    Case(
        "alarm-handler-raises",
        GROUP,
        PLAIN
        + """\
import signal
def late(number, frame):
    raise TimeoutError("step 17 took longer than 1 s")
signal.signal(signal.SIGALRM, late)
def step():
    total = 0
    while True:
        total += 1
if rank == 0:
    signal.alarm(1)
    step()
time.sleep(60)
""",
        ranks=(0,),
        says=("step 17 took longer than 1 s",),
    ),
    Case(
        "own-watchdog-of-a-victim",
        GROUP,
        GLOO
        + """\
import signal
def late(number, frame):
    raise TimeoutError("no step within 4 s")
signal.signal(signal.SIGALRM, late)
for step in range(6):
    if rank == 0:
        signal.alarm(4)
    if rank == 3 and step == 4:
        time.sleep(90)  # a stalled filesystem
    dist.all_reduce(torch.ones(1))
""",
        # The handler runs when all_reduce returns, and that is when rank 3 has come: nothing shows what it did before.
        ranks=(),
        unknown_is_right=True,
    ),
    Case(
        "interrupt-raised-by-a-library",
        GROUP,
        PLAIN
        + """\
def poll_dashboard():
    raise KeyboardInterrupt("stop was asked for in the dashboard by user lena")
if rank == 1:
    poll_dashboard()
time.sleep(60)
""",
        ranks=(1,),
        says=("stop was asked for in the dashboard",),
    ),
    Case(
        "exit-with-an-object",
        GROUP,
        PLAIN
        + """\
if rank == 2:
    sys.exit({"stage": "warmup", "problem": "replay buffer has no episode"})
time.sleep(60)
""",
        ranks=(2,),
        says=("replay buffer has no episode",),
    ),
    Case(
        "exit-code-256-is-zero",
        GROUP,
        GLOO
        + """\
if rank == 2:
    print("cannot continue: 256 samples could not be read", file=sys.stderr, flush=True)
    sys.exit(256)
for step in range(50):
    dist.all_reduce(torch.ones(1))
""",
        ranks=(2,),
        says=("ended with 0", "256 samples could not be read"),
        unknown_is_right=True,
    ),
    Case(
        "exit-code-77-in-silence",
        GROUP,
        GLOO
        + """\
if rank == 3:
    os._exit(77)
for step in range(50):
    dist.all_reduce(torch.ones(1))
""",
        ranks=(3,),
        says=("exit code 77", "exitcode 77"),
    ),
    Case(
        "generator-raises-stop-iteration",
        GROUP,
        PLAIN
        + """\
def batches(source):
    while True:
        yield next(source)
if rank == 1:
    for batch in batches(iter([1, 2])):
        pass
time.sleep(60)
""",
        ranks=(1,),
        says=("generator raised StopIteration",),
    ),
    Case(
        "bare-stop-iteration",
        GROUP,
        GLOO
        + """\
def train(loader):
    data = iter(loader)
    for step in range(10):
        batch = next(data)
        dist.all_reduce(torch.ones(1))
train([1] * (10 if rank != 2 else 6))
""",
        ranks=(2,),
        says=("StopIteration",),
    ),
    Case(
        "exception-without-a-message",
        GROUP,
        PLAIN
        + """\
class Trainer:
    class StepError(Exception):
        pass
    def step(self):
        raise Trainer.StepError
if rank == 0:
    Trainer().step()
time.sleep(60)
""",
        ranks=(0,),
        says=("Trainer.StepError",),
    ),
    Case(
        "exception-with-notes",
        GROUP,
        PLAIN
        + """\
if rank == 1:
    try:
        int("0x1f")
    except ValueError as error:
        error.add_note("in row 812 of shards/00017.csv")
        error.add_note("column 'label'")
        raise
time.sleep(60)
""",
        ranks=(1,),
        says=("invalid literal for int()",),
    ),
    Case(
        "groups-in-a-group",
        GROUP,
        PLAIN
        + """\
def read(n):
    raise OSError(5, "bucket answers 503", f"s3://data/{n}")
def all_of():
    errors = []
    for n in range(3):
        try:
            read(n)
        except OSError as error:
            errors.append(error)
    raise ExceptionGroup("prefetch", [ExceptionGroup("wave 1", errors), ValueError("1 wave of 2 came")])
if rank == 3:
    all_of()
time.sleep(60)
""",
        ranks=(3,),
        says=("bucket answers 503", "prefetch"),
    ),
    Case(
        "message-of-megabytes",
        GROUP,
        PLAIN
        + """\
if rank == 2:
    raise ValueError("weights do not sum to 1: " + ", ".join(str(n / 7) for n in range(200000)))
time.sleep(60)
""",
        ranks=(2,),
        says=("weights do not sum to 1",),
    ),
    Case(
        "broken-logging-everywhere",
        GROUP,
        PLAIN
        + """\
import logging
logging.basicConfig()
logging.warning("step %d of %d", 3)
if rank == 1:
    def stage():
        return {"gpt": 1}["gtp"]
    stage()
time.sleep(1.5)
logging.warning("step %d of %d", 4)
time.sleep(60)
""",
        ranks=(1,),
        says=("KeyError: 'gtp'",),
    ),
    Case(
        "stacks-dumped-again-and-again",
        GROUP,
        PLAIN
        + """\
import faulthandler
faulthandler.dump_traceback_later(0.4, repeat=True)
time.sleep(1.5)
def schedule(step):
    raise ZeroDivisionError("warmup of 0 steps")
if rank == 0:
    schedule(3)
time.sleep(60)
""",
        ranks=(0,),
        says=("warmup of 0 steps",),
    ),
    Case(
        "rank-0-evaluates-too-long",
        GROUP,
        TORCH
        + """\
dist.init_process_group("gloo", timeout=timedelta(seconds=120))
group = dist.new_group(timeout=timedelta(seconds=4))
dist.barrier()
def evaluate():
    until = time.monotonic() + 100
    while time.monotonic() < until:
        torch.ones(64, 64) @ torch.ones(64, 64)
if rank == 0:
    evaluate()
dist.barrier(group=group)
""",
        ranks=(0,),
        unknown_is_right=True,
    ),
    Case(
        "one-rank-in-an-endless-loop-prints",
        GROUP,
        TORCH
        + """\
dist.init_process_group("gloo", timeout=timedelta(seconds=120))
group = dist.new_group(timeout=timedelta(seconds=4))
dist.barrier()
if rank == 2:
    n = 0
    while n != 7.5:  # packs a sequence that fits nowhere
        n += 1
        if n % 200000 == 0:
            print("packing", n, flush=True)
        if n > 10**9:
            break
dist.all_reduce(torch.ones(1), group=group)
""",
        ranks=(2,),
        unknown_is_right=True,
    ),
    Case(
        "destroyed-and-used-again",
        GROUP,
        GLOO
        + """\
for step in range(50):
    if rank == 3 and step == 20:
        dist.destroy_process_group()
    dist.all_reduce(torch.ones(1))
""",
        ranks=(3,),
        says=("process group",),
    ),
    Case(
        "object-of-an-unknown-class",
        GROUP,
        GLOO
        + """\
class Config:
    pass
if rank == 0:
    import types
    module = types.ModuleType("late"); sys.modules["late"] = module
    Config.__module__ = "late"; module.Config = Config
config = [Config() if rank == 0 else None]
dist.broadcast_object_list(config, src=0)
dist.barrier()
""",
        ranks=(1, 2, 3),
        says=("No module named 'late'",),
    ),
    Case(
        "folder-made-by-all-at-once",
        GROUP,
        PLAIN
        + """\
time.sleep(0.2 * rank)
if rank:
    os.makedirs("out/run-1")
else:
    os.makedirs("out/run-1", exist_ok=True)
time.sleep(60)
""",
        ranks=(1, 2, 3),
        says=("File exists",),
    ),
    Case(
        "interrupted-within-cleanup",
        GROUP,
        PLAIN
        + """\
class Store:
    def __enter__(self):
        return self
    def __exit__(self, *error):
        raise RuntimeError("cannot close the store: 2 writers are open")
if rank == 1:
    with Store():
        try:
            assert 3 == 4, "batch has 3 images and 4 captions"
        finally:
            print("leaving", flush=True)
time.sleep(60)
""",
        ranks=(1,),
        says=("batch has 3 images and 4 captions",),
    ),
    Case(
        "non-blocking-result-never-read",
        GROUP,
        PLAIN
        + """\
from concurrent.futures import ThreadPoolExecutor
def save(step):
    raise OSError(122, "Disk quota exceeded", f"/scratch/u/step-{step}.pt")
if rank == 2:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(save, 100)
    time.sleep(0.5)
    future.result()
time.sleep(60)
""",
        ranks=(2,),
        says=("Disk quota exceeded",),
    ),
    Case(
        "async-task-died-and-loop-ends",
        GROUP,
        PLAIN
        + """\
import asyncio
async def stream():
    raise ConnectionError("feature server closed the stream of user 12")
async def main():
    task = asyncio.create_task(stream())
    await asyncio.sleep(0.3)
    if task.done():
        raise SystemExit("input stream ended")
if rank == 0:
    asyncio.run(main())
time.sleep(60)
""",
        ranks=(0,),
        says=("feature server closed the stream", "input stream ended"),
    ),
    Case(
        "text-that-cannot-be-printed",
        GROUP,
        PLAIN
        + """\
if rank == 3:
    print("Zürich ✓")
time.sleep(60)
""",
        ranks=(3,),
        says=("'ascii' codec can't encode",),
        environ={"PYTHONIOENCODING": "ascii"},
    ),
)

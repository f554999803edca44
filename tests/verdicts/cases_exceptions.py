"""Python exceptions: chains, final barriers, handlers that raise, logged ones, threads, asyncio, groups."""

from __future__ import annotations

from tests.verdicts.case import ENVIRON, GLOO, MEET, Case

GROUP = "python exceptions"

CASES = (
    Case(
        "finally-barrier",
        GROUP,
        GLOO
        + """\
def train_epoch():
    if rank == 3:
        raise FloatingPointError("overflow in layer 12, scale is 0.0")
try:
    train_epoch()
    dist.all_reduce(torch.ones(8))
finally:
    dist.barrier()
""",
        ranks=(3,),
        says=("overflow in layer 12",),
    ),
    Case(
        "plain-exception",
        GROUP,
        ENVIRON
        + MEET
        + """\
if rank == 2:
    {"lr": 0.1}["learning_rate"]
time.sleep(60)
""",
        ranks=(2,),
        says=("KeyError: 'learning_rate'",),
    ),
    Case(
        "wrapped-in-words-of-a-symptom",
        GROUP,
        ENVIRON
        + MEET
        + """\
def sample(weights):
    if min(weights) < 0:
        raise ValueError("negative sampling weight -0.25 for source 'wiki'")
if rank == 1:
    try:
        sample([0.5, -0.25])
    except ValueError as error:
        raise RuntimeError("input worker closed: connection closed by peer stage") from error
time.sleep(60)
""",
        ranks=(1,),
        says=("negative sampling weight",),
    ),
    Case(
        "handler-calls-a-collective",
        GROUP,
        GLOO
        + """\
group = dist.new_group(timeout=timedelta(seconds=4))
try:
    assert rank != 2, "loss is not finite: nan"
    dist.barrier(group=group)
except AssertionError:
    failed = torch.ones(1)
    dist.all_reduce(failed, group=group)  # the others are in the barrier
    raise
""",
        ranks=(2,),
        says=("loss is not finite",),
    ),
    Case(
        "sigterm-handlers-raise",
        GROUP,
        ENVIRON
        + """\
import signal
class JobCancelled(Exception): pass
def on_term(number, frame):
    raise JobCancelled("checkpoint of step 40 was interrupted")
signal.signal(signal.SIGTERM, on_term)
"""
        + MEET
        + """\
if rank == 1:
    raise LookupError("no schedule for phase 'cooldown'")
time.sleep(60)
""",
        ranks=(1,),
        says=("no schedule for phase",),
    ),
    Case(
        "sigterm-cleanup-fails",
        GROUP,
        GLOO
        + """\
try:
    if rank == 0:
        raise LookupError("unknown optimizer 'adamx'")
    dist.all_reduce(torch.ones(4))
finally:
    if rank != 0:
        open(f"/nonexistent/metrics-{rank}.json", "w")
""",
        ranks=(0,),
        says=("unknown optimizer",),
    ),
    Case(
        "prints-and-lives-on",
        GROUP,
        ENVIRON
        + """\
import atexit
def flush_metrics():
    open("stream-closed", "w").close()
    time.sleep(3)
"""
        + MEET
        + """\
if rank == 2:
    atexit.register(flush_metrics)
    raise ArithmeticError("perplexity is negative: -3.1")
if rank == 1:
    while not os.path.exists("stream-closed"):
        time.sleep(0.02)
    time.sleep(0.8)
    raise EOFError("metrics stream ended early")
time.sleep(60)
""",
        ranks=(2,),
        says=("perplexity is negative",),
    ),
    Case(
        "logged-long-before",
        GROUP,
        ENVIRON
        + """\
import logging
logging.basicConfig(level="INFO")
log = logging.getLogger("train")
"""
        + MEET
        + """\
if rank == 0:
    try:
        open("/nonexistent/cache.idx")
    except OSError:
        log.exception("no cache, building the index anew")
    for step in range(150):
        log.info("step %d loss %.3f", step, 3 / (step + 1))
    print("accuracy below threshold: 0.31 < 0.60, stopping", file=sys.stderr)
    sys.exit(1)
time.sleep(60)
""",
        ranks=(0,),
        says=("accuracy below threshold",),
        not_says=("FileNotFoundError",),
    ),
    Case(
        "logged-and-then-exit",
        GROUP,
        ENVIRON
        + """\
import logging
logging.basicConfig(format="%(asctime)s [%(levelname)s] %(message)s")
"""
        + MEET
        + """\
def main():
    if rank == 3:
        raise ValueError("unknown dataset split 'trian'")
    time.sleep(60)
try:
    main()
except Exception as error:
    logging.critical("training aborted: %s", error, exc_info=True)
    sys.exit(1)
""",
        ranks=(3,),
        says=("unknown dataset split 'trian'",),
    ),
    Case(
        "thread-fails-first",
        GROUP,
        ENVIRON
        + """\
import queue, threading
batches = queue.Queue()
def prefetch():
    for record in range(8):
        if record == 5 and rank == 3:
            raise ValueError("unterminated record at byte 88123 of shard-3")
        batches.put(record)
"""
        + MEET
        + """\
threading.Thread(target=prefetch, daemon=True, name="prefetch").start()
for step in range(8):
    batches.get(timeout=1.5)
time.sleep(60)
""",
        ranks=(3,),
        says=("unterminated record at byte 88123",),
    ),
    Case(
        "thread-ends-the-process",
        GROUP,
        ENVIRON
        + """\
import threading, traceback
def fatal(args):
    traceback.print_exception(args.exc_type, args.exc_value, args.exc_traceback)
    os._exit(70)
threading.excepthook = fatal
def save():
    raise TypeError("cannot serialise <lambda> in 'lr_lambdas'")
"""
        + MEET
        + """\
if rank == 0:
    threading.Thread(target=save).start()
time.sleep(60)
""",
        ranks=(0,),
        says=("cannot serialise <lambda>",),
    ),
    Case(
        "asyncio-gather",
        GROUP,
        ENVIRON
        + MEET
        + """\
import asyncio
async def fetch(shard):
    await asyncio.sleep(0.01 * shard)
    if shard == 3 and rank == 1:
        raise ValueError("checksum of shard 3 is 9f1c, not 77aa")
async def background():
    raise TimeoutError("telemetry upload timed out")
async def main():
    lost = asyncio.ensure_future(background())
    await asyncio.gather(*(fetch(shard) for shard in range(5)))
    await asyncio.sleep(60)
asyncio.run(main())
""",
        ranks=(1,),
        says=("checksum of shard 3",),
    ),
    Case(
        "task-group",
        GROUP,
        ENVIRON
        + MEET
        + """\
class StreamError(Exception): pass
def step():
    errors = []
    for name in ("a", "b"):
        try:
            raise StreamError(f"stream {name}: offset 77 is past the end 64")
        except StreamError as error:
            errors.append(error)
    raise ExceptionGroup("unhandled errors in a TaskGroup", errors)
if rank == 2:
    step()
time.sleep(60)
""",
        ranks=(2,),
        says=("offset 77 is past the end",),
    ),
    Case(
        "str-raises",
        GROUP,
        ENVIRON
        + MEET
        + """\
class ShardMismatch(Exception):
    def __str__(self):
        return f"{self.expected} shards expected"
if rank == 3:
    raise ShardMismatch(7)
time.sleep(60)
""",
        ranks=(3,),
        says=("ShardMismatch",),
    ),
    Case(
        "message-quotes-a-symptom",
        GROUP,
        GLOO
        + """\
class EvaluationFailed(Exception):
    def __str__(self):
        return (
            "the judge's answer cannot be parsed:\\n\\n"
            "  > Traceback (most recent call last):\\n"
            "  > ConnectionResetError: [Errno 104] Connection reset by peer\\n\\n"
            "(answer 17 of 64)"
        )
if rank == 1:
    raise EvaluationFailed
dist.all_reduce(torch.ones(2))
""",
        ranks=(1,),
        says=("the judge's answer cannot be parsed",),
    ),
    Case(
        "buried-under-teardown",
        GROUP,
        ENVIRON
        + """\
import atexit, logging
logging.basicConfig(level="INFO")
def teardown():
    for worker in range(160):
        logging.warning("cache worker %d: releasing 12 buffers, 0 pending", worker)
atexit.register(teardown)
"""
        + MEET
        + """\
if rank == 2:
    raise NotImplementedError("rope scaling 'yarn2' for head_dim 96")
time.sleep(60)
""",
        ranks=(2,),
        says=("rope scaling 'yarn2'",),
    ),
    Case(
        "rich-traceback",
        GROUP,
        ENVIRON
        + """\
from rich.traceback import install
install()
"""
        + MEET
        + """\
def build(lr):
    if lr <= 0:
        raise ValueError("learning rate must be positive, is -0.001")
if rank == 0:
    build(-0.001)
time.sleep(60)
""",
        ranks=(0,),
        says=("learning rate must be positive",),
    ),
    Case(
        "hydra-like-wrapper",
        GROUP,
        ENVIRON
        + """\
import traceback
"""
        + MEET
        + """\
def main():
    if rank == 1:
        raise AttributeError("Key 'n_layer' is not in struct\\n    full_key: model.n_layer\\n    object_type=dict")
    time.sleep(60)
try:
    main()
except Exception:
    print("Error executing job with overrides: ['model=small', 'lr=0.1']", file=sys.stderr)
    traceback.print_exc()
    print("\\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.", file=sys.stderr)
    sys.exit(1)
""",
        ranks=(1,),
        says=("Key 'n_layer' is not in struct",),
    ),
    Case(
        "noise-of-finalizers",
        GROUP,
        ENVIRON
        + """\
class Client:
    def __del__(self):
        raise BrokenPipeError(32, "Broken pipe")
client = Client()
"""
        + MEET
        + """\
if rank == 0:
    raise ValueError("vocab_size 50257 is not divisible by 64")
time.sleep(60)
""",
        ranks=(0,),
        says=("vocab_size 50257",),
    ),
    Case(
        "victims-wrap-the-symptom",
        GROUP,
        GLOO
        + """\
class TrainerError(Exception): pass
if rank == 1:
    dist.destroy_process_group()
    time.sleep(0.4)
    raise ZeroDivisionError("tokens_seen is 0 in the throughput meter")
try:
    dist.all_reduce(torch.ones(4))
except RuntimeError as error:
    raise TrainerError(f"step 12 failed on rank {rank}") from error
""",
        ranks=(1,),
        says=("tokens_seen is 0",),
    ),
    Case(
        "assertion-without-text",
        GROUP,
        GLOO
        + """\
logits, labels = torch.zeros(8, 10), torch.zeros(7 if rank == 3 else 8)
assert logits.shape[0] == labels.shape[0]
dist.all_reduce(logits)
""",
        ranks=(3,),
        says=("assert logits.shape[0] == labels.shape[0]",),
    ),
    Case(
        "warning-as-error",
        GROUP,
        ENVIRON
        + """\
import warnings
warnings.simplefilter("error", RuntimeWarning)
"""
        + MEET
        + """\
if rank == 2:
    warnings.warn("invalid value encountered in log1p", RuntimeWarning)
time.sleep(60)
""",
        ranks=(2,),
        says=("invalid value encountered in log1p",),
    ),
    Case(
        "own-file-on-every-rank",
        GROUP,
        ENVIRON
        + MEET
        + """\
open(f"data/tokens-{rank:05d}-of-{world:05d}.bin", "rb")
""",
        ranks=(0, 1, 2, 3),
        says=("No such file or directory: 'data/tokens-0000",),
    ),
    Case(
        "close-the-group-and-raise-later",
        GROUP,
        GLOO
        + """\
def finish():
    dist.destroy_process_group()
    time.sleep(0.7)
    best = {}
    return best["val_loss"]
if rank == 2:
    finish()
dist.all_reduce(torch.ones(2))
""",
        ranks=(2,),
        says=("KeyError: 'val_loss'",),
    ),
)

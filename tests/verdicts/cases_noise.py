"""What lies over the cause: shells around the script, progress bars, colours, log formats, teardown, other errors.

Written when the mechanisms for the other groups stood already, as a test of them.
"""

from __future__ import annotations

from tests.verdicts.case import ENVIRON, GLOO, MEET, TORCH, Case

GROUP = "wrappers, noise"
ALL = (0, 1, 2, 3)
_SLEEP = "time.sleep(60)\n"
_SHELL = {"launch.sh": "#!/bin/bash\npython3 -u train.py\n"}
_WRAPPED = ("--no-python", "./launch.sh")

CASES = (
    Case(
        "shell-around-an-abort",
        GROUP,
        ENVIRON
        + """\
import ctypes
libc = ctypes.CDLL(None)
"""
        + MEET
        + """\
if rank == 2:
    libc.__assert_fail(b"head_dim <= 256", b"csrc/flash_api.cpp", 341, b"mha_fwd")
time.sleep(60)
""",
        ranks=(2,),
        says=("Assertion `head_dim <= 256' failed",),
        command=_WRAPPED,
        files=_SHELL,
    ),
    Case(
        "shell-around-a-kill",
        GROUP,
        ENVIRON + MEET + "if rank == 1:\n    os.kill(os.getpid(), 9)\n" + _SLEEP,
        ranks=(1,),
        says=("Killed", "SIGKILL", "137"),
        command=_WRAPPED,
        files=_SHELL,
    ),
    Case(
        "shell-around-a-crash",
        GROUP,
        GLOO
        + """\
import ctypes
if rank == 3:
    ctypes.string_at(8)
dist.all_reduce(torch.ones(2))
"""
        + _SLEEP,
        ranks=(3,),
        says=("Segmentation fault", "SIGSEGV"),
        command=_WRAPPED,
        files=_SHELL,
    ),
    Case(
        "shell-with-a-time-limit",
        GROUP,
        ENVIRON + MEET + _SLEEP,
        ranks=(2,),
        says=("exit code 124", "exitcode 124"),
        command=_WRAPPED,
        files={
            "launch.sh": """\
#!/bin/bash
[ "$RANK" = 2 ] && exec timeout 3 python3 -u train.py
exec python3 -u train.py
"""
        },
    ),
    Case(
        "preload-noise",
        GROUP,
        ENVIRON
        + """\
print("ERROR: ld.so: object 'libtcmalloc.so.4' from LD_PRELOAD cannot be preloaded: ignored.", file=sys.stderr)
"""
        + MEET
        + """\
if rank == 3:
    os.environ["DATA_ROOT"]
"""
        + _SLEEP,
        ranks=(3,),
        says=("KeyError: 'DATA_ROOT'",),
    ),
    Case(
        "resource-tracker-noise",
        GROUP,
        ENVIRON
        + MEET
        + """\
import atexit
def tracker():
    print("tracker.py:254: UserWarning: resource_tracker: There appear to be 3 leaked semaphore objects to clean up at "
          "shutdown\\n  warnings.warn('resource_tracker: There appear to be %d '", file=sys.stderr)
atexit.register(tracker)
if rank == 0:
    int("3e-4")
"""
        + _SLEEP,
        ranks=(0,),
        says=("invalid literal for int() with base 10: '3e-4'",),
    ),
    Case(
        "progress-bar",
        GROUP,
        ENVIRON
        + MEET
        + """\
for step in range(40):
    sys.stderr.write(f"\\r{step * 100 // 64:3d}%|{'#' * (step // 4):16}| {step}/64 [00:0{step % 10}<00:09, 31.2it/s]")
    if rank == 1 and step == 33:
        raise OverflowError("scale 65536.0 is above the largest half")
    time.sleep(0.01)
"""
        + _SLEEP,
        ranks=(1,),
        says=("scale 65536.0 is above",),
    ),
    Case(
        "colours",
        GROUP,
        ENVIRON
        + MEET
        + """\
import traceback
try:
    if rank == 2:
        raise ValueError("rope_theta is missing from config.json")
    time.sleep(60)
except ValueError:
    for line in traceback.format_exc().splitlines():
        print(f"\\033[1;31m{line}\\033[0m", file=sys.stderr)
    os._exit(1)
""",
        ranks=(2,),
        says=("rope_theta is missing",),
    ),
    Case(
        "log-lines-as-json",
        GROUP,
        ENVIRON
        + MEET
        + """\
import json, traceback
def log(level, message, **fields):
    print(json.dumps({"ts": 1764000000 + rank, "level": level, "msg": message, **fields}), file=sys.stderr)
log("info", "start")
try:
    if rank == 3:
        raise ValueError("mixture weights sum to 1.2")
    time.sleep(60)
except ValueError as error:
    log("fatal", "training failed", error=repr(error), stack=traceback.format_exc())
    sys.exit(1)
""",
        ranks=(3,),
        says=("mixture weights sum to 1.2",),
    ),
    Case(
        "traceback-on-stdout",
        GROUP,
        ENVIRON
        + MEET
        + """\
import traceback, warnings
warnings.warn("the fast tokenizer is not available")
try:
    if rank == 0:
        raise RuntimeError("no shard covers token 9_000_000_001")
    time.sleep(60)
except RuntimeError:
    traceback.print_exc(file=sys.stdout)
    sys.stdout.flush()
    os._exit(1)
""",
        ranks=(0,),
        says=("no shard covers token",),
    ),
    Case(
        "chain-of-four",
        GROUP,
        ENVIRON
        + MEET
        + """\
class StageError(Exception): pass
def stage(depth):
    if depth == 0:
        return [][3]
    try:
        stage(depth - 1)
    except (IndexError, StageError) as error:
        raise StageError(f"stage {depth} lost its connection to stage {depth - 1}") from error
if rank == 1:
    stage(3)
"""
        + _SLEEP,
        ranks=(1,),
        says=("list index out of range",),
    ),
    Case(
        "exit-of-a-context-manager",
        GROUP,
        GLOO
        + """\
group = dist.new_group(timeout=timedelta(seconds=4))
class Trainer:
    def __enter__(self):
        return self
    def __exit__(self, *_):
        dist.monitored_barrier(group=group, timeout=timedelta(seconds=4))
with Trainer():
    if rank == 2:
        raise UnicodeError("vocab.txt has a BOM")
    dist.all_reduce(torch.ones(2), group=group)
""",
        ranks=(2,),
        says=("vocab.txt has a BOM",),
    ),
    Case(
        "victims-leave-with-a-sentence",
        GROUP,
        GLOO
        + """\
if rank == 2:
    dist.destroy_process_group()
    time.sleep(0.5)
    raise TypeError("'NoneType' object is not subscriptable")
try:
    dist.all_reduce(torch.ones(2))
except RuntimeError as error:
    print(f"rank {rank}: communication failed ({str(error)[-60:]}), leaving", file=sys.stderr)
    sys.exit(1)
""",
        ranks=(2,),
        says=("'NoneType' object is not subscriptable",),
    ),
    Case(
        "nan-on-all-ranks",
        GROUP,
        GLOO
        + """\
loss = torch.tensor([float("nan") if rank == 1 else 2.0])
dist.all_reduce(loss)
if not torch.isfinite(loss):
    raise FloatingPointError(f"loss is {loss.item()} at step 0")
""",
        ranks=ALL,
        says=("loss is nan at step 0",),
    ),
    Case(
        "forgotten-breakpoint",
        GROUP,
        ENVIRON + MEET + "breakpoint()\n" + _SLEEP,
        ranks=ALL,
        says=("BdbQuit",),
    ),
    Case(
        "asks-for-input",
        GROUP,
        ENVIRON + MEET + 'if rank == 0:\n    input("overwrite the output folder? [y/N] ")\n' + _SLEEP,
        ranks=(0,),
        says=("EOF when reading a line",),
    ),
    Case(
        "kills-its-process-group",
        GROUP,
        ENVIRON
        + MEET
        + """\
import signal
if rank == 1:
    print("cleanup: ending all loader processes", file=sys.stderr)
    os.killpg(0, signal.SIGTERM)
"""
        + _SLEEP,
        ranks=(1,),
        says=("SIGTERM",),
    ),
    Case(
        "spawn-without-a-main-guard",
        GROUP,
        ENVIRON
        + MEET
        + """\
import multiprocessing
def evaluate():
    pass
if rank == 2:
    child = multiprocessing.get_context("spawn").Process(target=evaluate)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""
        + _SLEEP,
        ranks=(2,),
        says=("bootstrapping phase",),
    ),
    Case(
        "circular-import",
        GROUP,
        ENVIRON + "import model\n",
        ranks=ALL,
        says=("cannot import name 'Block' from partially initialized module",),
        files={"model.py": "from layers import Block\n", "layers.py": "from model import Block\n"},
    ),
    Case(
        "undefined-symbol",
        GROUP,
        ENVIRON
        + """\
import ctypes
"""
        + MEET
        + """\
if rank == 3:
    ctypes.CDLL(None).fused_adam_v2
"""
        + _SLEEP,
        ranks=(3,),
        says=("undefined symbol: fused_adam_v2",),
    ),
    Case(
        "no-cuda-in-this-torch",
        GROUP,
        TORCH + 'torch.ones(1, device="cuda")\n',
        ranks=ALL,
        says=("Torch not compiled with CUDA enabled",),
    ),
    Case(
        "error-among-retries",
        GROUP,
        ENVIRON
        + """\
import logging
logging.basicConfig(level="INFO", format="%(levelname)s:%(name)s:%(message)s")
"""
        + MEET
        + """\
def fetch(attempt):
    raise ConnectionError(f"mirror {attempt} refused")
if rank == 1:
    for attempt in range(3):
        try:
            fetch(attempt)
        except ConnectionError:
            logging.warning("attempt %d failed, trying the next mirror", attempt, exc_info=True)
    logging.error("all 3 mirrors failed, using the copy of last week")
    raise ValueError("copy of last week has 0 records")
"""
        + _SLEEP,
        ranks=(1,),
        says=("copy of last week has 0 records",),
        not_says=("mirror 2 refused",),
    ),
)

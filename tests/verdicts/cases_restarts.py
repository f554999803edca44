"""Workers that are started again, and fail again."""

from __future__ import annotations

from tests.verdicts.case import ENVIRON, GLOO, MEET, TORCH, Case
from tests.verdicts.cases_peers import ENDED_WITH_0

GROUP = "restarts"

_ROUND = 'round_index = int(os.environ["TORCHELASTIC_RESTART_COUNT"])\n'
_ONCE = ("--max-restarts", "1")

CASES = (
    Case(
        "another-failure-after-the-restart",
        GROUP,
        GLOO
        + _ROUND
        + """\
def train():
    if round_index == 0 and rank == 2:
        raise ValueError("target 51 is out of bounds")
    if round_index == 1 and rank == 1:
        raise KeyError("optimizer_state")
    for step in range(40):
        dist.all_reduce(torch.ones(4))
        time.sleep(0.05)

train()
""",
        # The report is on the last failure, and lists the first under its round: either is the cause of a round.
        ranks=(1, 2),
        says=("target 51 is out of bounds", "optimizer_state"),
        options=_ONCE,
    ),
    Case(
        "checkpoint-half-written-before-the-restart",
        GROUP,
        TORCH
        + _ROUND
        + """\
import signal
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
dist.barrier()
if os.path.exists("latest.pt"):
    torch.load("latest.pt")
if rank == 0:
    torch.save({"weights": torch.zeros(1000)}, "whole.pt")
    with open("whole.pt", "rb") as whole, open("latest.pt", "wb") as half:
        half.write(whole.read()[:900])
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
""",
        # Round 1: all ranks fail at the half file. Round 0: rank 0 was killed.
        ranks=(0, 1, 2, 3),
        says=("PytorchStreamReader", "EOFError", "SIGKILL"),
        options=_ONCE,
    ),
    Case(
        "the-same-failure-twice",
        GROUP,
        ENVIRON
        + MEET.replace('meet("here")', "")
        + _ROUND
        + """\
meet(f"round{round_index}")
if rank == 2:
    open("data/part-7.parquet")
time.sleep(60)
""",
        ranks=(2,),
        says=("part-7.parquet",),
        options=_ONCE,
    ),
    Case(
        "a-peer-goes-after-the-restart",
        GROUP,
        GLOO
        + _ROUND
        + """\
for step in range(40):
    if round_index == 0 and rank == 1 and step == 5:
        raise ValueError("bad shard")
    if round_index == 1 and rank == 3 and step == 5:
        os._exit(0)
    dist.all_reduce(torch.ones(4))
""",
        # Of the round that ended the job, rank 3; to name rank 1 of the round before with its error is not wrong.
        ranks=(3,),
        says=ENDED_WITH_0,
        options=_ONCE,
        unknown_is_right=True,
    ),
    Case(
        "cause-lives-on-in-both-rounds",
        GROUP,
        GLOO
        + _ROUND
        + """\
import traceback
steps = dist.new_group(timeout=timedelta(seconds=2))
try:
    for step in range(10):
        if rank == 3 and step == 4:
            raise RecursionError("module graph has a cycle: encoder -> encoder")
        dist.all_reduce(torch.ones(4), group=steps)
except RecursionError:
    traceback.print_exc()
    time.sleep(4)
    sys.exit(1)
""",
        ranks=(3,),
        says=("module graph has a cycle",),
        options=_ONCE,
    ),
)

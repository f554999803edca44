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
)

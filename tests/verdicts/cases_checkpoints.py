"""Checkpoints: mismatches, full disks, distributed checkpoints whose ranks fail, files that vanish."""

from __future__ import annotations

from tests.rigs.local_run import LocalRun
from tests.verdicts.case import ENVIRON, GLOO, MEET, Case, wait_file

GROUP = "checkpoints"
ALL = (0, 1, 2, 3)
_MODEL = """\
from torch import nn
def model(width):
    return nn.Sequential(nn.Linear(8, width), nn.Linear(width, 2))
"""


def _remove_checkpoint(run: LocalRun) -> None:
    """What a clean-up job does in the night."""
    for rank in range(4):
        wait_file(run, f"waiting-{rank}")
    (run.folder / "step-100.ckpt").unlink()
    (run.folder / "cleaned").touch()


CASES = (
    Case(
        "missing-keys",
        GROUP,
        GLOO
        + _MODEL
        + """\
state = {f"module.{name}": value for name, value in model(4).state_dict().items()}
model(4).load_state_dict(state)
dist.all_reduce(torch.ones(2))
""",
        ranks=ALL,
        says=("Missing key(s) in state_dict",),
    ),
    Case(
        "size-mismatch-on-one-rank",
        GROUP,
        GLOO
        + _MODEL
        + """\
model(16 if rank == 3 else 4).load_state_dict(model(4).state_dict())
dist.all_reduce(torch.ones(2))
""",
        ranks=(3,),
        says=("size mismatch for 0.weight",),
    ),
    Case(
        "torch-save-on-a-full-disk",
        GROUP,
        GLOO
        + """\
if rank == 0:
    torch.save({"model": torch.zeros(2_000_000)}, "scratch/step-50.pt")
dist.barrier()
""",
        ranks=(0,),
        says=("No space left", "inline_container", "PytorchStreamWriter", "disk is full"),
        tmpfs={"scratch": "2m"},
        category="infrastructure",
    ),
    Case(
        "write-on-a-full-disk",
        GROUP,
        ENVIRON
        + MEET
        + """\
if rank == 2:
    with open("scratch/optimizer.bin", "wb") as file:
        for part in range(64):
            file.write(b"0" * 100_000)
time.sleep(60)
""",
        ranks=(2,),
        says=("No space left on device",),
        tmpfs={"scratch": "1m"},
        category="infrastructure",
    ),
    Case(
        "dcp-write-fails-on-one-rank",
        GROUP,
        GLOO
        + """\
import errno
import torch.distributed.checkpoint as dcp
class Writer(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        if rank == 2:
            raise OSError(errno.EDQUOT, "Disk quota exceeded", "/project/ckpt/__2_0.distcp")
        return super().write_data(plan, planner)
dcp.save({f"weight.{rank}": torch.ones(4), "step": torch.tensor(7)}, storage_writer=Writer("ckpt"))
dist.barrier()
""",
        ranks=(2,),
        says=("Disk quota exceeded",),
    ),
    Case(
        "dcp-plan-fails-on-one-rank",
        GROUP,
        GLOO
        + """\
import torch.distributed.checkpoint as dcp
class Planner(dcp.DefaultSavePlanner):
    def create_local_plan(self):
        if rank == 1:
            raise TypeError("cannot shard a sparse tensor: embed.weight")
        return super().create_local_plan()
dcp.save({f"weight.{rank}": torch.ones(4)}, checkpoint_id="ckpt", planner=Planner())
""",
        ranks=(1,),
        says=("cannot shard a sparse tensor",),
    ),
    Case(
        "dcp-load-missing-key",
        GROUP,
        GLOO
        + """\
import torch.distributed.checkpoint as dcp
dcp.save({"body": torch.ones(4)}, checkpoint_id="ckpt")
dcp.load({"body": torch.ones(4), "value_head": torch.ones(2)}, checkpoint_id="ckpt")
""",
        ranks=ALL,
        says=("value_head",),
    ),
    Case(
        "weights-only-refused",
        GROUP,
        GLOO
        + """\
from fractions import Fraction
if rank == 0:
    torch.save({"ratio": Fraction(1, 3)}, "mix.pt")
    torch.load("mix.pt")
dist.barrier()
""",
        ranks=(0,),
        says=("Weights only load failed",),
    ),
    Case(
        "checkpoint-removed-meanwhile",
        GROUP,
        ENVIRON
        + """\
if rank == 0:
    open("step-100.ckpt", "w").close()
"""
        + MEET
        + """\
open(f"waiting-{rank}", "w").close()
while not os.path.exists("cleaned"):
    time.sleep(0.02)
if rank == 3:
    open("step-100.ckpt").read()
time.sleep(60)
""",
        ranks=(3,),
        says=("No such file or directory: 'step-100.ckpt'",),
        act=_remove_checkpoint,
    ),
    Case(
        "empty-pickle",
        GROUP,
        ENVIRON
        + MEET
        + """\
import pickle
if rank == 1:
    open("rng.pkl", "wb").close()
    pickle.load(open("rng.pkl", "rb"))
time.sleep(60)
""",
        ranks=(1,),
        says=("EOFError: Ran out of input",),
    ),
    Case(
        "only-rank-0-finds-a-checkpoint",
        GROUP,
        GLOO
        + """\
step = [torch.load("resume.pt")["step"] if rank == 0 else None]
dist.broadcast_object_list(step, src=0)
time.sleep(60)
""",
        ranks=(0,),
        says=("No such file or directory: 'resume.pt'",),
    ),
)

"""DistributedDataParallel, FSDP and what belongs to them: parameters, buffers, inputs, checkpoints, samplers."""

from __future__ import annotations

from tests.verdicts.case import GLOO, Case

GROUP = "ddp and fsdp"

_DDP = GLOO + "from torch.nn.parallel import DistributedDataParallel as DDP\ntorch.manual_seed(0)\n"

CASES = (
    Case(
        "unused-parameters-everywhere",
        GROUP,
        _DDP
        + """\
class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return self.first(self.body(x))  # the second head is not used

model = DDP(TwoHeads())
for step in range(3):
    model(torch.ones(2, 8)).sum().backward()
""",
        ranks=(0, 1, 2, 3),
        says=("Expected to have finished reduction in the prior iteration",),
    ),
    Case(
        "unused-parameters-on-one-rank",
        GROUP,
        GLOO
        + """\
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
steps = dist.new_group(timeout=timedelta(seconds=4))

class Mixture(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.expert = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x, routed):
        return self.expert(self.shared(x)) if routed else self.shared(x)

model = DDP(Mixture(), process_group=steps)
for step in range(4):
    routed = not (rank == 1 and step == 1)  # no token of this batch went to the expert
    model(torch.ones(2, 8), routed).sum().backward()
""",
        # The others wait for its gradients; it fails at its next forward.
        ranks=(1,),
        says=("Expected to have finished reduction in the prior iteration",),
    ),
    Case(
        "model-of-another-width",
        GROUP,
        _DDP
        + """\
hidden = int(os.environ.get("HIDDEN", 32)) + (1 if rank == 2 else 0)
model = torch.nn.Sequential(torch.nn.Linear(8, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 2))
model = DDP(model)
for step in range(3):
    model(torch.ones(2, 8)).sum().backward()
""",
        ranks=(2,),
        says=("[2]", "sizes [33", "appears not to match"),
    ),
    Case(
        "model-with-one-layer-more",
        GROUP,
        _DDP
        + """\
layers = [torch.nn.Linear(8, 8) for _ in range(3 if rank == 3 else 2)]
model = DDP(torch.nn.Sequential(*layers))
model(torch.ones(2, 8)).sum().backward()
""",
        # torch's own text names the rank that differs, on every rank.
        ranks=(0, 1, 2, 3),
        says=("DDP expects same model across all ranks",),
        unknown_is_right=True,
    ),
    Case(
        "join-throws-on-early-termination",
        GROUP,
        _DDP
        + """\
from torch.distributed.algorithms.join import Join
model = DDP(torch.nn.Linear(8, 2))
batches = 4 if rank == 2 else 6
with Join([model], throw_on_early_termination=True):
    for batch in range(batches):
        model(torch.ones(2, 8)).sum().backward()
""",
        ranks=(0, 1, 2, 3),
        says=("exhausted",),
    ),
    Case(
        "buffer-of-another-size",
        GROUP,
        _DDP
        + """\
class Masked(torch.nn.Module):
    def __init__(self, length):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(length))

    def forward(self, x):
        return self.linear(x)

model = DDP(Masked(1024 if rank != 1 else 2048))
model(torch.ones(2, 8)).sum().backward()
dist.barrier()
""",
        ranks=(1,),
        unknown_is_right=True,
    ),
    Case(
        "nothing-to-train",
        GROUP,
        _DDP
        + """\
model = torch.nn.Linear(4, 4)
for parameter in model.parameters():
    parameter.requires_grad_(False)  # the adapter was never added
model = DDP(model)
""",
        ranks=(0, 1, 2, 3),
        # torch 2.13 writes "any parameter that requires"; the expectation had the text of an older one.
        says=("doesn't have any parameter that requires a gradient",),
    ),
    Case(
        "parameter-ready-twice",
        GROUP,
        _DDP
        + """\
model = DDP(torch.nn.Linear(4, 4), find_unused_parameters=False)
first = model(torch.ones(1, 4)).sum()
second = model(torch.ones(1, 4)).sum()
first.backward()
(first * second).backward()
""",
        ranks=(0, 1, 2, 3),
        says=("backward through the graph a second time", "marked a variable ready", "mark a variable ready only once"),
    ),
    Case(
        "checkpoint-does-not-fit-one-rank",
        GROUP,
        _DDP
        + """\
model = torch.nn.Linear(8, 4 if rank != 3 else 6)
state = {"weight": torch.zeros(4, 8), "bias": torch.zeros(4)}
model.load_state_dict(state)
model = DDP(model)
""",
        ranks=(3,),
        says=("size mismatch for weight",),
    ),
    Case(
        "sampler-of-an-empty-shard",
        GROUP,
        _DDP
        + """\
from torch.utils.data import DataLoader, TensorDataset
rows = torch.ones(96, 8)[rank * 32 : (rank + 1) * 32]
loader = DataLoader(TensorDataset(rows), batch_size=8, shuffle=True)
model = DDP(torch.nn.Linear(8, 2))
for (batch,) in loader:
    model(batch).sum().backward()
""",
        ranks=(3,),
        says=("num_samples should be a positive integer",),
    ),
    Case(
        "one-rank-cannot-save-its-part",
        GROUP,
        GLOO
        + """\
import torch.distributed.checkpoint as dcp

state = {"weights": torch.ones(16), f"loader-{rank}": {"position": 100}}
if rank == 2:
    state[f"loader-{rank}"]["shuffle"] = (number for number in range(3))
dcp.save(state, checkpoint_id="checkpoint-100")
""",
        # All ranks raise the coordinator's CheckpointException; it has the error of rank 2.
        ranks=(0, 1, 2, 3),
        says=("generator",),
    ),
    Case(
        "fully-shard-then-a-missing-key",
        GROUP,
        GLOO
        + """\
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (world,))
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
fully_shard(model, mesh=mesh)
batches = [{"input": torch.ones(2, 16)} for _ in range(4)]
if rank == 1:
    batches[2] = {"inputs": torch.ones(2, 16)}
for batch in batches:
    model(batch["input"]).sum().backward()
""",
        ranks=(1,),
        says=("KeyError: 'input'",),
    ),
    Case(
        "shapes-do-not-fit-in-one-batch",
        GROUP,
        _DDP
        + """\
model = DDP(torch.nn.Linear(8, 2))
for step in range(6):
    width = 7 if rank == 0 and step == 4 else 8
    model(torch.ones(2, width)).sum().backward()
""",
        ranks=(0,),
        says=("cannot be multiplied",),
    ),
)

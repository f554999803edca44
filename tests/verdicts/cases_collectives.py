"""Ranks that do not run the same collectives: shape, type, order, group, number, keys of the store."""

from __future__ import annotations

from tests.verdicts.case import GLOO, TORCH, Case
from tests.verdicts.cases_peers import ENDED_WITH_0, SHORT

GROUP = "collectives"

_DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}

CASES = (
    Case(
        "last-batch-is-smaller",
        GROUP,
        SHORT
        + """\
dataset = torch.arange(0, 57.0)
mine = dataset[rank * 16 : (rank + 1) * 16]  # the last rank has 9
dist.all_reduce(mine.clone(), group=steps)
dist.barrier(group=steps)
""",
        # gloo's words carry the sizes, not whose they are; the others may only feel the lost connection.
        ranks=(3,),
        unknown_is_right=True,
    ),
    Case(
        "double-on-one-rank",
        GROUP,
        SHORT
        + """\
import json
settings = json.load(open("rank1.json")) if rank == 1 else {}
dtype = getattr(torch, settings.get("dtype", "float32"))
for step in range(5):
    loss = torch.ones(256, dtype=dtype)
    dist.all_reduce(loss, group=steps)
""",
        ranks=(1,),
        unknown_is_right=True,
        files={"rank1.json": '{"dtype": "float64"}'},
    ),
    Case(
        "other-order-under-detail",
        GROUP,
        GLOO
        + """\
def sync(first):
    pieces = [torch.zeros(4) for _ in range(world)]
    if first == "gather":
        dist.all_gather(pieces, torch.ones(4))
        dist.all_reduce(torch.ones(4))
    else:
        dist.all_reduce(torch.ones(4))
        dist.all_gather(pieces, torch.ones(4))

sync("gather" if rank == 3 else "reduce")
""",
        ranks=(3,),
        says=("mismatch between collectives", "ALLGATHER"),
        environ=_DETAIL,
        unknown_is_right=True,
    ),
    Case(
        "other-shape-under-detail",
        GROUP,
        GLOO
        + """\
vocabulary = 32000 if rank != 1 else 32008  # one rank padded it
embedding = torch.zeros(vocabulary)
dist.all_reduce(embedding)
""",
        ranks=(1,),
        says=("32008",),
        environ=_DETAIL,
        unknown_is_right=True,
    ),
    Case(
        "skips-a-step-where-the-loss-is-nan",
        GROUP,
        SHORT
        + """\
for step in range(12):
    loss = torch.tensor([float("nan") if rank == 2 and step == 5 else 0.5])
    if torch.isnan(loss):
        continue  # its all_reduce is missing from here on
    dist.all_reduce(loss, group=steps)
print("trained")
if rank == 2:
    time.sleep(0.5)
dist.destroy_process_group()
""",
        # It runs one collective less than the others, and ends with 0 while they wait in their last one.
        ranks=(2,),
        unknown_is_right=True,
    ),
    Case(
        "collective-on-rank-0-only",
        GROUP,
        SHORT
        + """\
def log_metrics(loss):
    if rank == 0:
        dist.all_reduce(loss, group=steps)  # meant for all ranks
        print(f"loss {loss.item() / world}")

def train():
    for step in range(4):
        if step == 2:
            log_metrics(torch.ones(1))
        time.sleep(0.1)
    time.sleep(8)  # validates on its own data

train()
dist.barrier()
""",
        ranks=(0,),
        says=("log_metrics", "all_reduce"),
        unknown_is_right=True,
    ),
    Case(
        "new-group-by-one-rank",
        GROUP,
        TORCH
        + """\
dist.init_process_group("gloo", timeout=timedelta(seconds=6))
dist.barrier()
if rank == 0:
    logging_group = dist.new_group([0], timeout=timedelta(seconds=3))
else:
    time.sleep(30)
dist.barrier()
""",
        # The odd one out is rank 0, and it fails. The first expectation had it wait in new_group: a group of one is
        # made at once, and it waits in the barrier behind.
        ranks=(0,),
        unknown_is_right=True,
    ),
    Case(
        "own-store-expects-one-more",
        GROUP,
        TORCH
        + """\
store = dist.TCPStore("127.0.0.1", 29917, world + 1, is_master=rank == 0, timeout=timedelta(seconds=5))
store.set(f"ready-{rank}", "1")
""",
        # All four came; the number in the script is wrong, and no rank is. The first expectation had all four: it would
        # have taken "look at ranks 1-3" for right.
        ranks=(),
        says=("4/5 clients joined",),
        unknown_is_right=True,
    ),
    Case(
        "key-of-the-store-mistyped",
        GROUP,
        GLOO
        + """\
store = dist.distributed_c10d._get_default_store()
name = "loaded" if rank != 3 else "loaded_"
store.set(f"{name}/{rank}", "1")
if rank == 3:
    dist.barrier()
store.wait([f"loaded/{other}" for other in range(world)], timedelta(seconds=3))
dist.barrier()
""",
        ranks=(3,),
        unknown_is_right=True,
    ),
    Case(
        "broadcast-from-another-source",
        GROUP,
        SHORT
        + """\
source = 2 if rank == 2 else 0  # "the first rank of my node"
weights = torch.full((1000,), float(rank))
for layer in range(3):
    dist.broadcast(weights, src=source, group=steps)
dist.barrier(group=steps)
""",
        ranks=(2,),
        unknown_is_right=True,
    ),
    Case(
        "fewer-batches-on-one-rank",
        GROUP,
        GLOO
        + """\
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
model = DDP(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = 9 if rank == 3 else 10
for batch in range(batches):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
print("epoch done")
""",
        ranks=(3,),
        says=ENDED_WITH_0,
        unknown_is_right=True,
    ),
    Case(
        "receives-into-a-smaller-tensor",
        GROUP,
        SHORT
        + """\
if rank == 0:
    dist.send(torch.zeros(64), dst=1, group=steps)
elif rank == 1:
    dist.recv(torch.zeros(16), src=0, group=steps)
dist.barrier(group=steps)
""",
        # The two disagree with one another: either is the place to look.
        ranks=(0, 1),
        unknown_is_right=True,
    ),
    Case(
        "gather-list-too-short",
        GROUP,
        GLOO
        + """\
def collect(value):
    into = [torch.zeros(1) for _ in range(torch.get_num_threads() + 2)] if rank == 0 else None
    dist.gather(torch.tensor([value]), into, dst=0)
    return into

collect(float(rank))
dist.barrier()
""",
        ranks=(0,),
        says=("gather",),
    ),
    Case(
        "object-that-cannot-be-pickled",
        GROUP,
        GLOO
        + """\
results = {"score": 0.5, "rank": rank}
if rank == 2:
    results["postprocess"] = lambda text: text.strip()
gathered = [None] * world
dist.all_gather_object(gathered, results)
""",
        ranks=(2,),
        says=("pickle",),
    ),
    Case(
        "split-sizes-do-not-add-up",
        GROUP,
        GLOO
        + """\
tokens = torch.arange(16.0)
splits = [4, 4, 4, 4] if rank != 1 else [8, 4, 4, 4]
received = torch.empty(16)
dist.all_to_all_single(received, tokens, [4] * world, splits)
dist.barrier()
""",
        ranks=(1,),
        says=("Split sizes", "dim 0"),
    ),
    Case(
        "reduces-on-another-group",
        GROUP,
        GLOO
        + """\
tensor_parallel = [dist.new_group(pair, timeout=timedelta(seconds=3)) for pair in ([0, 1], [2, 3])]
everyone = dist.new_group(timeout=timedelta(seconds=3))
group = tensor_parallel[rank // 2] if rank != 1 else everyone
dist.all_reduce(torch.ones(32), group=group)
time.sleep(6)
dist.barrier()
""",
        # Rank 0 waits for rank 1 in their pair; rank 1 waits for all in the world.
        ranks=(1,),
        unknown_is_right=True,
    ),
)

"""The script's own set-up is wrong: ports, backends, ranks, world sizes, init methods."""

from __future__ import annotations

from tests.verdicts.case import ENVIRON, GLOO, TORCH, Case

GROUP = "set-up"

CASES = (
    # With a TCPStore of its own, as first written, nothing fails: torch lets the agent's store serve.
    Case(
        "serves-on-the-master-port",
        GROUP,
        GLOO
        + """\
import socket

def parameter_server():
    return socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))

if rank == 0:
    server = parameter_server()
dist.barrier()
""",
        ranks=(0,),
        says=("address already in use", "EADDRINUSE"),
    ),
    Case(
        "binds-a-metrics-port-twice",
        GROUP,
        GLOO
        + """\
from http.server import BaseHTTPRequestHandler, HTTPServer
if local_rank == 0:
    node = int(os.environ["GROUP_RANK"])
    metrics = HTTPServer(("127.0.0.1", 29871 + node), BaseHTTPRequestHandler)
dist.barrier()
if rank == 3:
    metrics = HTTPServer(("127.0.0.1", 29872), BaseHTTPRequestHandler)
dist.barrier()
time.sleep(20)
""",
        # HTTPServer sets SO_REUSEADDR, which does not help against a socket that listens. Rank 2 has the port.
        ranks=(3,),
        says=("Address already in use",),
    ),
    Case(
        "initialised-twice",
        GROUP,
        GLOO
        + """\
class Trainer:
    def __init__(self):
        dist.init_process_group("gloo")

Trainer()
""",
        ranks=(0, 1, 2, 3),
        says=("initialize the default process group twice",),
    ),
    Case(
        "nccl-without-gpus",
        GROUP,
        TORCH
        + """\
dist.init_process_group("nccl", timeout=timedelta(seconds=10))
dist.barrier()
""",
        ranks=(0, 1, 2, 3),
        says=("NCCL",),
    ),
    Case(
        "cuda-without-gpus",
        GROUP,
        TORCH
        + """\
device = torch.device("cuda", local_rank)
model = torch.nn.Linear(4, 4).to(device)
""",
        ranks=(0, 1, 2, 3),
        says=("CUDA",),
    ),
    # A file in a folder that is not there, as first written, is waited for without end.
    Case(
        "init-method-without-a-port",
        GROUP,
        TORCH
        + """\
address = os.environ["MASTER_ADDR"]
dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=world)
""",
        ranks=(0, 1, 2, 3),
        says=("port number missing",),
    ),
    Case(
        "rank-counted-from-one",
        GROUP,
        TORCH
        + """\
me = rank if rank != 3 else 4
dist.init_process_group("gloo", init_method="env://", rank=me, world_size=world, timeout=timedelta(seconds=5))
dist.barrier()
""",
        ranks=(3,),
        unknown_is_right=True,
    ),
    Case(
        "world-size-one-too-large",
        GROUP,
        TORCH
        + """\
os.environ["WORLD_SIZE"] = "5"  # left from another job
dist.init_process_group("gloo", timeout=timedelta(seconds=5))
dist.barrier()
""",
        # Every rank came, and the fifth does not exist: no rank is to be suspected.
        ranks=(),
        unknown_is_right=True,
    ),
    Case(
        "local-rank-taken-for-the-rank",
        GROUP,
        TORCH
        + """\
dist.init_process_group("gloo", rank=local_rank, world_size=world, timeout=timedelta(seconds=5))
dist.barrier()
""",
        # Two of each: all do the same wrong thing, and no single rank is to be suspected.
        ranks=(),
        unknown_is_right=True,
    ),
    Case(
        "backend-mistyped",
        GROUP,
        TORCH
        + """\
dist.init_process_group(backend="cpu:glo")
""",
        ranks=(0, 1, 2, 3),
        says=("glo",),
    ),
    Case(
        "one-rank-at-another-master",
        GROUP,
        TORCH
        + """\
if rank == 2:
    os.environ["MASTER_PORT"] = "9"  # its profile sets it
dist.init_process_group("gloo", timeout=timedelta(seconds=6))
dist.barrier()
""",
        ranks=(2,),
        unknown_is_right=True,
    ),
    Case(
        "group-used-before-it-is-made",
        GROUP,
        TORCH
        + """\
print(f"rank {dist.get_rank()} of {dist.get_world_size()}")
dist.init_process_group("gloo")
""",
        ranks=(0, 1, 2, 3),
        says=("Default process group has not been initialized",),
    ),
    Case(
        "master-address-mistyped-everywhere",
        GROUP,
        TORCH
        + """\
os.environ["MASTER_ADDR"] = "head-node.invalid"
dist.init_process_group("gloo", timeout=timedelta(seconds=5))
""",
        # A name that no host has is written in the script; each rank's text has it.
        ranks=(0, 1, 2, 3),
        says=("head-node.invalid",),
        unknown_is_right=True,
    ),
    Case(
        "variable-of-another-launcher",
        GROUP,
        ENVIRON
        + """\
def setup():
    return int(os.environ["OMPI_COMM_WORLD_RANK"])

setup()
""",
        ranks=(0, 1, 2, 3),
        says=("OMPI_COMM_WORLD_RANK",),
    ),
)

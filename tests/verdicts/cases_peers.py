"""A rank that goes away without a sound: it ends with 0, leaves its process group, or is replaced by another program.

The others only feel a lost connection or wait in vain; none of their exceptions is the cause.
"""

from __future__ import annotations

from tests.verdicts.case import ENVIRON, GLOO, MEET, Case

GROUP = "peers"

SHORT = GLOO + "steps = dist.new_group(timeout=timedelta(seconds=3))\n"
"""All ranks have met; collectives in the group `steps` wait for 3 s."""

ENDED_WITH_0 = (
    "ended with 0",
    "exited with 0",
    "exit code 0",
    "exitcode 0",
    "terminate called without an active exception",
)
"""The fact by which a reader understands such a failure. The last one was added after the first runs: a busy machine's
interpreter sometimes aborts in its teardown, where the process group was not destroyed, and that is the end then."""

CASES = (
    Case(
        "peer-stops-early",
        GROUP,
        GLOO
        + """\
best, patience = float("inf"), 0
for epoch in range(50):
    loss = torch.tensor([1.0 / (epoch + 1)])
    if rank == 2 and epoch == 7:
        print("validation loss has not improved, stopping early")
        break
    dist.all_reduce(loss)
if rank != 2:
    dist.destroy_process_group()
""",
        ranks=(2,),
        says=ENDED_WITH_0,
        unknown_is_right=True,
    ),
    Case(
        "peer-licence-os-exit",
        GROUP,
        GLOO
        + """\
def check_licence():
    # what a vendor's library does where it has no seat left
    if rank == 3:
        os._exit(0)

weights = torch.randn(1000)
for step in range(20):
    dist.broadcast(weights, src=0)
    if step == 5:
        check_licence()
""",
        ranks=(3,),
        says=ENDED_WITH_0,
        unknown_is_right=True,
    ),
    Case(
        "peer-leaves-group-and-uploads",
        GROUP,
        GLOO
        + """\
shards = {0: 6, 1: 4, 2: 6, 3: 6}[rank]
for shard in range(shards):
    dist.all_reduce(torch.ones(16) * shard)
    time.sleep(0.05)
if rank == 1:
    dist.destroy_process_group()
    time.sleep(20)  # uploads its outputs
else:
    dist.barrier()
""",
        # It still ran when the job stopped it: no exit code of its own says anything.
        ranks=(1,),
        unknown_is_right=True,
    ),
    Case(
        "peer-pipeline-stage-exits",
        GROUP,
        GLOO
        + """\
def stage(microbatches):
    for index in range(microbatches):
        activations = torch.zeros(32)
        if rank > 0:
            dist.recv(activations, src=rank - 1)
        if rank < world - 1:
            dist.send(activations + 1, dst=rank + 1)

stage(4 if rank == 1 else 8)
if rank == 1:
    sys.exit(0)
dist.barrier()
""",
        ranks=(1,),
        says=ENDED_WITH_0,
        unknown_is_right=True,
    ),
    Case(
        "peer-not-at-monitored-barrier",
        GROUP,
        GLOO
        + """\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--eval-ranks", type=int, default=3)
args = parser.parse_args()
if rank >= args.eval_ranks:
    print("nothing to evaluate on this rank")
    raise SystemExit
dist.monitored_barrier(timeout=timedelta(seconds=3))
""",
        ranks=(3,),
        says=ENDED_WITH_0,
        unknown_is_right=True,
    ),
    Case(
        "peer-not-at-gather",
        GROUP,
        GLOO
        + """\
def evaluate():
    scores = torch.full((4,), float(rank))
    if rank == 2:
        return  # the metric is turned off for the validation rank
    gathered = [torch.zeros(4) for _ in range(world)] if rank == 0 else None
    dist.gather(scores, gathered, dst=0)
    dist.barrier()

evaluate()
""",
        ranks=(2,),
        says=ENDED_WITH_0,
        unknown_is_right=True,
    ),
    Case(
        "peer-watchdog-thread-exits",
        GROUP,
        GLOO
        + """\
import threading

def watchdog(limit):
    time.sleep(limit)
    os._exit(0)

if rank == 0:
    threading.Thread(target=watchdog, args=(1.0,), daemon=True).start()
pieces = [torch.zeros(8) for _ in range(world)]
while True:
    dist.all_gather(pieces, torch.ones(8))
    time.sleep(0.02)
""",
        ranks=(0,),
        says=ENDED_WITH_0,
        unknown_is_right=True,
    ),
    Case(
        "peer-is-killed",
        GROUP,
        GLOO
        + """\
import signal

def step(index):
    if rank == 2 and index == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(64))

for index in range(200):
    step(index)
""",
        ranks=(2,),
        says=("SIGKILL",),
    ),
    Case(
        "peer-exits-with-5",
        GROUP,
        GLOO
        + """\
for step in range(30):
    if rank == 1 and step == 11:
        dist.destroy_process_group()  # without it the interpreter sometimes aborts in its teardown
        sys.exit(5)
    gradients = torch.ones(40)
    dist.all_reduce(gradients)
    gradients /= world
""",
        ranks=(1,),
        says=("exitcode 5", "exit code 5", "code 5", "exitcode  : 5"),
    ),
    Case(
        "peer-replaced-by-a-program",
        GROUP,
        GLOO
        + """\
dist.all_reduce(torch.ones(4))
if rank == 3:
    # a wrapper that was meant for the last rank's post-processing
    os.execvp("true", ["true", "postprocess"])
for step in range(100):
    dist.all_reduce(torch.ones(4))
""",
        ranks=(3,),
        says=ENDED_WITH_0,
        unknown_is_right=True,
    ),
    Case(
        "peer-error-swallowed",
        GROUP,
        GLOO
        + """\
import logging
logging.basicConfig(level=logging.INFO)
log = logging.getLogger("train")

def train():
    for step in range(30):
        if rank == 1 and step == 12:
            raise OverflowError("learning rate schedule: step 12 of 10")
        dist.all_reduce(torch.ones(4))

try:
    train()
except OverflowError as error:
    log.error("training ended early: %s", error)
""",
        ranks=(1,),
        says=(*ENDED_WITH_0, "step 12 of 10"),
        unknown_is_right=True,
    ),
    Case(
        "peers-of-one-node-have-no-data",
        GROUP,
        GLOO
        + """\
samples = list(range(7))[rank * 4 : rank * 4 + 4]
if not samples:
    print(f"rank {rank}: no samples, nothing to do")
    sys.exit()
for sample in samples:
    dist.all_reduce(torch.tensor([float(sample)]))
dist.barrier()
""",
        ranks=(2, 3),
        says=ENDED_WITH_0,
        unknown_is_right=True,
    ),
    Case(
        "peer-handles-a-signal-and-exits",
        GROUP,
        GLOO
        + """\
import signal

def save_and_leave(number, frame):
    torch.save({"step": step}, f"checkpoint-{rank}.pt")
    sys.exit(0)

signal.signal(signal.SIGUSR1, save_and_leave)
for step in range(400):
    if rank == 1 and step == 10:
        os.kill(os.getpid(), signal.SIGUSR1)  # as a site's script sends it to a single process
    dist.all_reduce(torch.ones(4))
    time.sleep(0.01)
""",
        ranks=(1,),
        says=ENDED_WITH_0,
        unknown_is_right=True,
    ),
    Case(
        "peer-hides-its-error-in-finally",
        GROUP,
        GLOO
        + """\
def train():
    for step in range(30):
        dist.all_reduce(torch.ones(4))
        if rank == 2 and step == 3:
            return {"loss": 0.1}["accuracy"]

try:
    train()
except KeyError:
    sys.stdout.flush()
    os._exit(0)  # teardown hangs otherwise
""",
        ranks=(2,),
        says=ENDED_WITH_0,
        unknown_is_right=True,
    ),
    Case(
        "peer-leaves-children-that-hold-its-sockets",
        GROUP,
        SHORT
        + """\
import subprocess

if rank == 1:
    # its copies of the connections stay open when the rank has ended
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    os._exit(0)
for step in range(10):
    dist.all_reduce(torch.ones(4), group=steps)
""",
        ranks=(1,),
        says=ENDED_WITH_0,
        unknown_is_right=True,
    ),
    Case(
        "peer-of-a-plain-socket-exits",
        GROUP,
        ENVIRON
        + MEET
        + """\
import socket, struct

def serve():
    with socket.create_server(("127.0.0.1", 0)) as server:
        with open("port.tmp", "w") as file:
            file.write(str(server.getsockname()[1]))
        os.rename("port.tmp", "port")
        clients = [server.accept()[0] for _ in range(world - 1)]
        for client in clients:
            client.sendall(b"ready\\n")
        time.sleep(0.3)
        os._exit(0)

def receive():
    while not os.path.exists("port"):
        time.sleep(0.02)
    with socket.create_connection(("127.0.0.1", int(open("port").read()))) as server:
        stream = server.makefile("rb")
        assert stream.readline() == b"ready\\n"
        header = stream.read(8)
        (size,) = struct.unpack("<Q", header)
        return stream.read(size)

serve() if rank == 0 else receive()
""",
        # The clients' struct.error is what they make of the end of the stream. It is raised in the user's code, and no
        # text in it speaks of a peer: to name it is no mistake of the report's.
        ranks=(0, 1, 2, 3),
        says=(*ENDED_WITH_0, "unpack requires a buffer of 8 bytes"),
        unknown_is_right=True,
    ),
    Case(
        "peer-closes-its-sockets-behind-a-long-save",
        GROUP,
        GLOO
        + """
def save_shard():
    # rank 3 writes for minutes, and would come back to the collective
    while True:
        with open(f"shard-{rank}", "wb") as file:
            file.write(os.urandom(1 << 16))
        time.sleep(0.05)

for step in range(30):
    dist.all_reduce(torch.ones(64))
    time.sleep(0.1)
if rank == 3:
    save_shard()
if rank == 1:
    # what a fork-safety hook of a library does in the wrong process
    import socket
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:"):
            try:
                socket.socket(fileno=os.dup(int(fd))).shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
    time.sleep(30)
dist.all_reduce(torch.ones(64))
""",
        # Two ranks are silent: whose sockets were closed, the addresses show.
        ranks=(1,),
        unknown_is_right=True,
    ),
)

"""The user's own sockets, subprocesses and multiprocessing: what breaks there is no lost peer."""

from __future__ import annotations

from tests.verdicts.case import ENVIRON, GLOO, MEET, Case

GROUP = "own services, processes"
_PEERS = "dist.all_reduce(torch.ones(2))\ntime.sleep(60)\n"
_SLEEP = "time.sleep(60)\n"
_RESET_SERVER = """\
import socket, struct, threading
def serve_and_reset(server):
    client, _ = server.accept()
    client.recv(4)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
server = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=serve_and_reset, args=(server,), daemon=True).start()
address = server.getsockname()
"""

CASES = (
    Case(
        "data-server-resets",
        GROUP,
        GLOO
        + _RESET_SERVER
        + """\
if rank == 2:
    features = socket.create_connection(address)
    features.sendall(b"next batch")
    features.recv(1024)
"""
        + _PEERS,
        ranks=(2,),
        says=("Connection reset by peer",),
    ),
    Case(
        "pipe-to-a-decoder",
        GROUP,
        GLOO
        + """\
import subprocess
if rank == 1:
    decoder = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    decoder.wait()
    decoder.stdin.write(b"frame")
    decoder.stdin.flush()
"""
        + _PEERS,
        ranks=(1,),
        says=("Broken pipe",),
    ),
    Case(
        "manager-killed",
        GROUP,
        ENVIRON
        + MEET
        + """\
import multiprocessing
if __name__ == "__main__":
    if rank == 3:
        manager = multiprocessing.Manager()
        progress = manager.dict()
        manager._process.kill()
        manager._process.join()
        progress["step"] = 1
    time.sleep(60)
""",
        ranks=(3,),
        says=("ConnectionResetError", "BrokenPipeError", "EOFError", "ConnectionRefusedError"),
    ),
    Case(
        "pool-worker-raises",
        GROUP,
        ENVIRON
        + MEET
        + """\
import multiprocessing
def tokenize(line):
    return [{"a": 1}[character] for character in line]
if rank == 0:
    with multiprocessing.Pool(2) as pool:
        pool.map(tokenize, ["aaa", "aba", "aaa"])
"""
        + _SLEEP,
        ranks=(0,),
        says=("KeyError: 'b'",),
    ),
    Case(
        "process-pool-broken",
        GROUP,
        ENVIRON
        + MEET
        + """\
from concurrent.futures import ProcessPoolExecutor
def pack(part):
    os._exit(1)
if rank == 1:
    with ProcessPoolExecutor(1) as pool:
        pool.submit(pack, 0).result()
"""
        + _SLEEP,
        ranks=(1,),
        says=("BrokenProcessPool",),
    ),
    Case(
        "metrics-server-refuses",
        GROUP,
        GLOO
        + """\
import socket, urllib.request
with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
if rank == 0:
    urllib.request.urlopen(f"http://127.0.0.1:{port}/api/runs", timeout=5)
"""
        + _PEERS,
        ranks=(0,),
        says=("Connection refused",),
    ),
    Case(
        "metrics-server-is-silent",
        GROUP,
        GLOO
        + """\
import socket, urllib.request
server = socket.create_server(("127.0.0.1", 0))
if rank == 2:
    urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/api/runs", timeout=1)
"""
        + _PEERS,
        ranks=(2,),
        says=("TimeoutError: timed out", "timed out"),
    ),
    Case(
        "child-says-why",
        GROUP,
        ENVIRON
        + MEET
        + """\
import subprocess
if rank == 1:
    subprocess.run(["tar", "-xf", "/nonexistent/imagenet-00017.tar"], check=True)
"""
        + _SLEEP,
        ranks=(1,),
        says=("imagenet-00017.tar: Cannot open",),
    ),
    Case(
        "child-says-why-and-exit-code-is-handed-on",
        GROUP,
        ENVIRON
        + MEET
        + """\
import subprocess
if rank == 3:
    child = "import sys; sys.exit('index has 3 columns, 4 expected')"
    sys.exit(subprocess.run([sys.executable, "-c", child]).returncode)
"""
        + _SLEEP,
        ranks=(3,),
        says=("index has 3 columns, 4 expected",),
    ),
    Case(
        # Mistaken at first: Python prints the seconds that were left, 0.99997 or so.
        "child-takes-too-long",
        GROUP,
        ENVIRON
        + MEET
        + """\
import subprocess
if rank == 3:
    subprocess.run(["sleep", "30"], timeout=1, check=True)
"""
        + _SLEEP,
        ranks=(3,),
        says=("Command '['sleep', '30']' timed out after",),
    ),
    Case(
        "name-that-does-not-resolve",
        GROUP,
        ENVIRON
        + MEET
        + """\
import socket
if rank == 2:
    socket.getaddrinfo("artifacts.invalid", 443)
"""
        + _SLEEP,
        ranks=(2,),
        says=("gaierror",),
    ),
    Case(
        "spawned-process-raises",
        GROUP,
        GLOO
        + """\
import torch.multiprocessing as mp
def evaluate(index, name):
    raise ValueError(f"no metric is named {name}")
if __name__ == "__main__":
    if rank == 2:
        mp.start_processes(evaluate, args=("blue",), nprocs=1, start_method="fork")
    dist.all_reduce(torch.ones(2))
    time.sleep(60)
""",
        ranks=(2,),
        says=("no metric is named blue",),
    ),
    Case(
        "queue-process-is-gone",
        GROUP,
        GLOO
        + """\
import multiprocessing
if rank == 1:
    ours, theirs = multiprocessing.Pipe()
    def produce():
        ours.close()
        theirs.send(1)
        os._exit(0)
    producer = multiprocessing.get_context("fork").Process(target=produce)
    producer.start()
    theirs.close()
    while True:
        ours.recv()
"""
        + _PEERS,
        ranks=(1,),
        says=("EOFError",),
    ),
    Case(
        "own-port-taken",
        GROUP,
        ENVIRON
        + MEET
        + """\
import socket
if rank == 3:
    dashboard = socket.create_server(("127.0.0.1", 0))
    socket.create_server(dashboard.getsockname())
"""
        + _SLEEP,
        ranks=(3,),
        says=("Address already in use",),
    ),
    Case(
        "stream-ends-early",
        GROUP,
        GLOO
        + """\
import asyncio
async def hang_up(reader, writer):
    writer.write(b"\\0\\0\\0")
    writer.close()
async def fetch():
    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    await reader.readexactly(8)
if rank == 0:
    asyncio.run(fetch())
"""
        + _PEERS,
        ranks=(0,),
        says=("IncompleteReadError",),
    ),
)

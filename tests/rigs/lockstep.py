"""The reference for a user's script where there is no torch: ranks that sum integers over TCP in every step.

It imports nothing of this project. Its result depends on the number of steps alone, however many ranks made them and
however often they began again: ``--expect`` prints the state that ``--steps`` lead to. It ends there, or after the step
in which rank 0 finds the file ``--end``. Faults come from outside.
"""

import argparse
import contextlib
import hashlib
import json
import os
import signal
import socket
import struct
import time
from pathlib import Path

BATCH, PRIME = 24, (1 << 61) - 1
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
PAIR = struct.Struct("!QQ")


def gradient(state, step, rank, world_size):
    """The part of a step's sum that is `rank`'s."""
    samples = (hashlib.sha256(f"{state} {step} {i}".encode()).digest()[:7] for i in range(rank, BATCH, world_size))
    return sum(int.from_bytes(digest, "big") for digest in samples) % PRIME


def update(state, gradients):
    return (state * 48271 + gradients) % PRIME


def expected(steps):
    state = 1
    for step in range(steps):
        state = update(state, gradient(state, step, 0, 1))
    return state


def connect(timeout):
    """Rank 0's sockets to all others, or another rank's to rank 0."""
    port = 10_000 + int(os.environ["MASTER_PORT"]) % 20_000  # below those that the kernel gives to others
    deadline = time.monotonic() + timeout
    if RANK == 0:
        with socket.create_server(("", port)) as server:
            server.settimeout(timeout)
            peers = [server.accept()[0] for _ in range(WORLD_SIZE - 1)]
    else:
        peers = []
        while not peers and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                peers = [socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=5)]
            time.sleep(0.05)
    for peer in peers:
        peer.settimeout(timeout)
    return peers


def receive(peer):
    data = b""
    while len(data) < PAIR.size:
        piece = peer.recv(PAIR.size - len(data))
        if not piece:
            raise ConnectionError("peer closed the connection")
        data += piece
    return PAIR.unpack(data)


def all_reduce(peers, first, second):
    """Both values, each added up over all ranks."""
    if RANK:
        peers[0].sendall(PAIR.pack(first, second))
        return receive(peers[0])
    rows = [(first, second), *map(receive, peers)]
    total = [sum(column) % PRIME for column in zip(*rows, strict=True)]
    for peer in peers:
        peer.sendall(PAIR.pack(*total))
    return total


def save(folder, step, state):
    """Whole or not at all, and never over another one."""
    unfinished = Path(folder, f"step-{step:08d}.{os.getpid()}.tmp")
    unfinished.write_text(json.dumps([step, state]))
    unfinished.replace(Path(folder, f"step-{step:08d}.json"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1 << 40)
    parser.add_argument("--end", default="end")
    parser.add_argument("--checkpoints", default=".")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--save-on-sigterm", action="store_true")
    parser.add_argument("--step-seconds", type=float, default=0.05)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--expect", action="store_true")
    args = parser.parse_args()
    if args.expect:
        print(expected(args.steps))
        return
    peers = connect(args.timeout)
    found = sorted(Path(args.checkpoints).glob("step-*.json")) if RANK == 0 else []
    start = json.loads(found[-1].read_text()) if found else (0, 1) if RANK == 0 else (0, 0)
    step, state = all_reduce(peers, *start)
    print(f"rank {RANK} of {WORLD_SIZE} begins at step {step}", flush=True)
    if args.save_on_sigterm:
        save_and_end = lambda *_: (save(args.checkpoints, step, state), os._exit(0))  # noqa: E731
        signal.signal(signal.SIGTERM, signal.SIG_IGN if RANK else save_and_end)
    is_last = step >= args.steps
    while not is_last:
        ends = RANK == 0 and (step + 1 >= args.steps or os.path.exists(args.end))
        gradients, is_last = all_reduce(peers, gradient(state, step, RANK, WORLD_SIZE), ends)
        step, state = step + 1, update(state, gradients)
        print(f"step {step} at {time.time():.3f}", flush=True)
        if RANK == 0 and (is_last or step % args.save_every == 0):
            save(args.checkpoints, step, state)
        time.sleep(args.step_seconds)
    print(f"final: step={step} state={state}", flush=True)


if __name__ == "__main__":
    main()

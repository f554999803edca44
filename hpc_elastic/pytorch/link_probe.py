"""Measures the network between this node and one other at a time: the far end of `hpc_elastic.doctor.node_job`.

Started as a file by the workers' interpreter. The data goes as the workers' does, through NCCL (one rank for each GPU)
or gloo; without torch, through a plain TCP connection.

File descriptor 0 is a socket (``SOCK_SEQPACKET``) with one JSON object per message. To the doctor: ``{"backend": "nccl"
| "gloo" | "tcp", "gpus": n, "port": p}`` once all is imported. From it, one at a time: ``{"rank": 0 | 1, "addresses":
[…], "port": p, "backend": …, "gpus": n, "token": …, "seconds": s}``, the first three of rank 0's node; the answer is
``{"seconds": s, "bytes": n}`` for one transfer, the fastest of several, or ``{"why": …}``. The end of file ends this
process.

A pair meets on a TCP connection, by which rank 0 then names the port of a TCPStore. Collectives run in forks of this
process, since one that hangs can only be killed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {"nccl": 64 << 20, "gloo": 4 << 20, "tcp": 4 << 20}
"""Bytes that each rank sends to the other in one transfer."""
_CONNECT_SECONDS = 1.0
_MESSAGE = 65536


def main() -> None:
    control = socket.socket(fileno=0)
    listener = socket.socket()
    listener.bind(("0.0.0.0", 0))
    listener.listen(16)
    torch = _import_torch()
    gpus = torch.cuda.device_count() if torch is not None and torch.distributed.is_nccl_available() else 0
    backend = "tcp" if torch is None else "nccl" if gpus else "gloo"
    _send(control, {"backend": backend, "gpus": gpus, "port": listener.getsockname()[1]})
    while raw := control.recv(_MESSAGE):
        order = json.loads(raw)
        try:
            answer = measure(order, listener, torch)
        except Exception as error:
            answer = {"why": _describe(error)}
        _send(control, answer)


def _import_torch() -> Any:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # CPUs and NVIDIA's GPUs need no backend of others
    try:
        import torch
        import torch.distributed
    except Exception as error:  # a broken installation raises anything
        print(f"link probe: without torch: {error!r}", file=sys.stderr, flush=True)
        return None
    return torch if torch.distributed.is_available() and torch.distributed.is_gloo_available() else None


def measure(order: dict[str, Any], listener: socket.socket, torch: Any) -> dict[str, Any]:
    """Meet the other node and exchange data with it. OSError, RuntimeError: it did not come through in time."""
    deadline = time.monotonic() + order["seconds"]
    with _meet(order, listener, deadline) as peer:
        if order["backend"] == "tcp":
            return _transfers(SIZES["tcp"], _tcp_exchange(peer, deadline), _agreement(peer, order["rank"], deadline))
        return _measure_with_torch(order, peer, torch, deadline)


def _meet(order: dict[str, Any], listener: socket.socket, deadline: float) -> socket.socket:
    token = order["token"].encode()
    met = _accept(listener, token, deadline) if order["rank"] == 0 else _connect(order, token, deadline)
    met.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    met.settimeout(_left(deadline))
    return met


def _accept(listener: socket.socket, token: bytes, deadline: float) -> socket.socket:
    while True:
        if not select.select([listener], [], [], _left(deadline))[0]:
            raise OSError("the other node did not connect")
        connection, _ = listener.accept()
        try:
            soon = min(deadline, time.monotonic() + _CONNECT_SECONDS)
            if hmac.compare_digest(_receive(connection, len(token), soon), token):
                connection.sendall(token)
                return connection
        except OSError:
            pass  # a stranger, or of a round that is over
        connection.close()


def _connect(order: dict[str, Any], token: bytes, deadline: float) -> socket.socket:
    """Try all addresses until one answers, since the other end may come later."""
    why = "it has no address"
    while True:
        for address in order["addresses"]:
            seconds = min(_CONNECT_SECONDS, _left(deadline))
            try:
                connection = socket.create_connection((address, order["port"]), timeout=seconds)
            except OSError as error:
                why = f"{address}: {_describe(error)}"
                continue
            try:
                connection.sendall(token)
                if _receive(connection, len(token), deadline) == token:
                    return connection
                why = f"{address}: another program answers there"
            except OSError as error:
                why = f"{address}: {_describe(error)}"
            connection.close()
        if time.monotonic() + _CONNECT_SECONDS / 5 >= deadline:
            raise OSError(why)
        time.sleep(_CONNECT_SECONDS / 5)


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    found = bytearray()
    while len(found) < count:
        if time.monotonic() >= deadline:
            raise OSError("the data did not come through in time")
        connection.settimeout(_left(deadline))
        piece = connection.recv(count - len(found))
        if not piece:
            raise OSError("the other node closed the connection")
        found += piece
    return bytes(found)


def _agreement(peer: socket.socket, rank: int, deadline: float) -> Callable[[bool], bool]:

    def goes_on(wanted: bool) -> bool:
        if rank == 0:
            peer.sendall(b"1" if wanted else b"0")
            return wanted
        return _receive(peer, 1, deadline) == b"1"

    return goes_on


def _transfers(size: int, exchange: Callable[[int], None], goes_on: Callable[[bool], bool]) -> dict[str, Any]:
    """Exchange data until there is enough to measure by; the first, small one makes the connections.

    The fastest counts: what else runs on a node makes single ones slow, a slow link all of them.
    """
    exchange(min(size, 1 << 16))
    times: list[float] = []
    began = time.monotonic()
    while goes_on(len(times) < 16 and (not times or time.monotonic() - began < 1)):
        start = time.monotonic()
        exchange(size)
        times.append(time.monotonic() - start)
    return {"seconds": min(times), "bytes": size}


def _tcp_exchange(peer: socket.socket, deadline: float) -> Callable[[int], None]:
    def exchange(size: int) -> None:
        failed: list[OSError] = []

        def send() -> None:
            try:
                peer.sendall(bytes(size))
            except OSError as error:
                failed.append(error)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        _receive(peer, size, deadline)
        sender.join()
        if failed:
            raise failed[0]

    return exchange


def _measure_with_torch(order: dict[str, Any], peer: socket.socket, torch: Any, deadline: float) -> dict[str, Any]:
    local = max(1, order["gpus"]) if order["backend"] == "nccl" else 1
    store = None
    if order["rank"] == 0:
        store = torch.distributed.TCPStore(
            peer.getsockname()[0], 0, None, True, timeout=timedelta(seconds=_left(deadline)), wait_for_workers=False
        )
        peer.sendall(b"%05d" % store.port)
        where = (peer.getsockname()[0], store.port)
    else:
        where = (peer.getpeername()[0], int(_receive(peer, 5, deadline)))
    answers: list[dict[str, Any]] = []
    children: dict[int, int] = {}
    try:
        for index in range(local):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                try:
                    rank, left = order["rank"] * local + index, _left(deadline)
                    answer = _torch_transfers(rank, 2 * local, order["backend"], where, left, torch, index)
                except BaseException as error:
                    answer = {"why": _describe(error)}
                os.write(writing, json.dumps(answer).encode())
                os._exit(0)
            os.close(writing)
            children[reading] = pid
        for reading in children:
            ready, _, _ = select.select([reading], [], [], _left(deadline))
            text = os.read(reading, _MESSAGE) if ready else b""
            late = f"no end of the transfer within {order['seconds']:g} s"
            answers.append(json.loads(text) if text else {"why": "its process ended" if ready else late})
    finally:
        for reading, pid in children.items():
            os.close(reading)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    with contextlib.suppress(OSError):  # the store lives here: not before the other end is done with it
        peer.sendall(b"e")
        _receive(peer, 1, deadline)
    del store
    return next((answer for answer in answers if "why" in answer), max(answers, key=lambda one: one.get("seconds", 0)))


def _torch_transfers(
    rank: int, world: int, backend: str, where: tuple[str, int], seconds: float, torch: Any, index: int
) -> dict[str, Any]:
    dist, limit = torch.distributed, timedelta(seconds=seconds)
    torch.set_num_threads(1)
    device = torch.device("cuda", index) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    store = dist.TCPStore(*where, None, False, timeout=limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    buffers: dict[int, tuple[Any, list[Any]]] = {}

    def exchange(size: int) -> None:
        if size not in buffers:
            mine = torch.zeros(size, dtype=torch.uint8, device=device)
            buffers[size] = (mine, [torch.empty_like(mine) for _ in range(world)])
        mine, all_of_them = buffers[size]
        dist.all_gather(all_of_them, mine)
        if backend == "nccl":
            torch.cuda.synchronize(device)

    def goes_on(wanted: bool) -> bool:
        flag = torch.tensor([int(wanted)], device=device)
        dist.broadcast(flag, src=0)
        return bool(flag.item())

    return _transfers(SIZES[backend], exchange, goes_on)


def _describe(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join((text or type(error).__name__).split())[:200]


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the doctor has gone: the next receive says so
        control.send(json.dumps(message).encode())


if __name__ == "__main__":
    if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]  # run as a file: its neighbours must not shadow anybody's modules
    main()

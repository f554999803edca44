"""A cable that takes time: ``python -m tests.rigs.slurm_cluster.delayed_link PORT SECONDS`` in the switch's namespace.

It passes each frame on between a host's port, which is no port of the bridge meanwhile, and a TAP device that is one,
SECONDS later; netem is not in every kernel. Ends with SIGTERM. In the host's namespace, with a device alone: that
computes its checksums from now on, which else only a real card would.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x1002
_SIOCETHTOOL, _ETHTOOL_STXCSUM = 0x8946, 0x17
_ALL_FRAMES = 0x0003
_ENOUGH = 1 << 16


def main(port: str, seconds: float) -> None:
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", f"{port}-late".encode(), _TAP_WITHOUT_HEADER))
    cable = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_FRAMES))
    cable.bind((port, _ALL_FRAMES))
    os.set_blocking(tap, False)
    cable.setblocking(False)
    print("ready", flush=True)
    on_way: deque[tuple[float, bool, bytes]] = deque()
    while True:
        wait = None if not on_way else max(0.0, on_way[0][0] - time.monotonic())
        readable, _, _ = select.select([tap, cable], [], [], wait)
        now = time.monotonic()
        while on_way and on_way[0][0] <= now:
            _, to_host, frame = on_way.popleft()
            try:
                cable.send(frame) if to_host else os.write(tap, frame)
            except OSError:
                pass  # lost, as a frame may be
        for source in readable:
            try:
                if source is tap:
                    on_way.append((now + seconds, True, os.read(tap, _ENOUGH)))
                else:
                    frame, address = cable.recvfrom(_ENOUGH)
                    if address[2] != socket.PACKET_OUTGOING:
                        on_way.append((now + seconds, False, frame))
            except BlockingIOError:
                continue


def compute_checksums(device: str) -> None:
    off = (ctypes.c_uint32 * 2)(_ETHTOOL_STXCSUM, 0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        fcntl.ioctl(asks, _SIOCETHTOOL, struct.pack("16sP16x", device.encode(), ctypes.addressof(off)))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        compute_checksums(sys.argv[1])
    else:
        main(sys.argv[1], float(sys.argv[2]))

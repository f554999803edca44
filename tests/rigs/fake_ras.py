"""A server that speaks the text protocol of NCCL's RAS, as src/ras/client_support.cc of NCCL 2.28 to 2.31 does."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Fault(Enum):
    NONE = "none"
    SLOW = "slow"
    """It takes the commands and never answers STATUS."""
    DRIPS = "drips"
    """A byte at a time, for ever."""
    CLOSES = "closes"
    """In the middle of the answer."""
    GARBAGE = "garbage"
    """Another protocol: it answers everything with an HTTP error."""
    SILENT = "silent"
    """It accepts, and never says a word."""
    REFUSES_STATUS = "refuses status"
    """``ERROR: Unknown command``, and waits on."""
    HUGE = "huge"
    """An answer without an end."""


@dataclass
class FakeRas:
    """Answers at `address` until it is closed."""

    answer: Callable[[], str] = lambda: ""
    fault: Fault = Fault.NONE
    knows_json: bool = True
    port: int = 0
    asked: list[str] = field(default_factory=list)
    """Every command so far."""

    def __post_init__(self) -> None:
        self._listener = socket.socket()
        # NCCL sets both: all processes of a node listen on one port, and the kernel chooses one for each connection.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._listener.bind(("127.0.0.1", self.port))
        self._listener.listen()
        self.address = self._listener.getsockname()
        self._stop = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._stop.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # a thread waits in accept, which would hold it open
        self._listener.close()

    def __enter__(self) -> FakeRas:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            for command in self._commands(connection):
                self.asked.append(command)
                upper = command.upper()
                if self.fault is Fault.SILENT:
                    self._stop.wait()
                elif self.fault is Fault.GARBAGE:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
                    return
                elif upper.startswith("CLIENT PROTOCOL "):
                    connection.sendall(b"SERVER PROTOCOL 2\n")
                elif upper.startswith("TIMEOUT ") or (upper == "SET FORMAT JSON" and self.knows_json):
                    connection.sendall(b"OK\n")
                elif upper in ("STATUS", "VERBOSE STATUS") and self.fault is not Fault.REFUSES_STATUS:
                    self._answer(connection)
                    return
                else:
                    connection.sendall(f"ERROR: Unknown command {command}\n".encode())

    def _commands(self, connection: socket.socket) -> Iterator[str]:
        buffer = b""
        while data := connection.recv(1024):
            *lines, buffer = (buffer + data).split(b"\n")
            yield from (line.decode().rstrip("\r") for line in lines)

    def _answer(self, connection: socket.socket) -> None:
        raw = self.answer().encode()
        if self.fault is Fault.SLOW:
            self._stop.wait()
        elif self.fault is Fault.CLOSES:
            connection.sendall(raw[: len(raw) // 2])
        elif self.fault is Fault.HUGE:
            while not self._stop.is_set():
                connection.sendall(b"x" * (1 << 20))
        elif self.fault is Fault.DRIPS:
            for byte in raw:
                connection.sendall(bytes([byte]))
                if self._stop.wait(0.05):
                    return
        else:
            connection.sendall(raw)

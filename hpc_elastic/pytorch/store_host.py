"""The process that serves a fresh torch ``TCPStore`` each round, on a socket that its agent bound and listens on.

Started by `hpc_elastic.agent.store_server` as a file, so that any interpreter with torch can run it: it needs torch and
the standard library alone. It lives across rounds: torch is imported once. The control socket (``SOCK_SEQPACKET``)
carries one JSON object per message. Its end of file ends this process, and so does the death of the agent.

torch is imported *leanly* unless ``--full`` is given: only its extension module, with bare stand-ins for the Python
packages around it. torch 2.13 (CPU): 0.25 s and 148 MB resident (75 MB private) against 1.0 s and 223 MB (146 MB). What
does not work that way is noticed by a trial store, and this process starts itself again with ``--full``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import socket
import sys
import types
from datetime import timedelta
from typing import Any

_PR_SET_PDEATHSIG = 1
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)
_MESSAGE_LIMIT = 65536


def import_store_class(*, lean: bool) -> Any:
    """`lean` loads torch's extension module alone: a process that has done so can't import torch any more. It raises
    also when the class is there but does not work.
    """
    if not lean:
        from torch.distributed import TCPStore

        return TCPStore
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("there is no torch package")
    _stand_in("torch", spec.submodule_search_locations)
    for folder in spec.submodule_search_locations:
        # What torch/__init__.py loads first where it is there: CUDA builds need its symbols to be global.
        library = os.path.join(folder, "lib", "libtorch_global_deps.so")
        if os.path.exists(library):
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    extension = importlib.import_module("torch._C")
    # _c10d_init() looks these up only to hang the class on them.
    _stand_in("torch.distributed", [])
    _stand_in("torch.distributed.distributed_c10d", [])
    if not extension._c10d_init():
        raise ImportError("this torch is built without torch.distributed")
    store_class = importlib.import_module("torch._C._distributed_c10d").TCPStore
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        store = serve(store_class, "127.0.0.1", port, listener.detach())
    store.set("key", "value")
    if bytes(store.get("key")) != b"value" or store.add("count", 2) != 2:
        raise RuntimeError("a trial store gave back something else than was put in")
    return store_class


def _stand_in(name: str, path: list[str]) -> None:
    module = types.ModuleType(name)
    module.__path__ = list(path)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def serve(store_class: Any, host: str, port: int, listening_fd: int) -> Any:
    """`host` and `port` are where this process itself connects to it."""
    return store_class(
        host,
        port,
        None,
        True,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=listening_fd,
    )


class StoreHost:
    def __init__(self, control: socket.socket, store_class: Any) -> None:
        self._control = control
        self._store_class = store_class
        self._store: Any = None

    def run(self) -> None:
        self._send({"is": "ready"})
        while True:
            try:
                raw, fds, _, _ = socket.recv_fds(self._control, _MESSAGE_LIMIT, 4, socket.MSG_CMSG_CLOEXEC)
            except OSError:
                return
            if not raw:
                return
            self._handle(json.loads(raw), fds)

    def _handle(self, message: dict[str, Any], fds: list[int]) -> None:
        serial = message.get("serial")
        self._store = None  # the last reference: its destructor ends the server and frees the port
        if message.get("do") != "serve":
            self._send({"is": "dropped", "serial": serial})
            return
        try:
            self._store = serve(self._store_class, message["host"], message["port"], fds[0])
        except Exception as error:
            self._send({"is": "failed", "serial": serial, "why": str(error)[:2000]})
        else:
            self._send({"is": "serving", "serial": serial})

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the agent has gone: the next receive says so
            self._control.send(json.dumps(message).encode())


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True, help="the control socket")
    parser.add_argument("--parent", type=int, required=True, help="the agent's process id")
    parser.add_argument("--full", action="store_true", help="import torch in the usual way")
    arguments = parser.parse_args(argv)
    # Slurm sends TERM to every process of a step, and workers that save a checkpoint still need their store.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # The kernel kills this process when the thread that started it ends; that may have happened already.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != arguments.parent:
        os._exit(0)
    code = 1
    try:
        try:
            store_class = import_store_class(lean=not arguments.full)
        except Exception as error:
            if arguments.full:
                raise
            print(f"store host: importing torch as a whole, since the lean import failed: {error!r}", file=sys.stderr)
            sys.stderr.flush()
            os.set_inheritable(arguments.fd, True)
            os.execv(sys.executable, [sys.executable, os.path.abspath(__file__), *argv, "--full"])
        StoreHost(socket.socket(fileno=arguments.fd), store_class).run()
        code = 0
    except BaseException as error:
        print(f"store host: {error!r}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]  # run as a file: its neighbours must not shadow anybody's modules
    main(sys.argv[1:])

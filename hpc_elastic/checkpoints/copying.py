"""The copies of a node's part: on the shared filesystem, and on the next node.

All nodes copy their files to the shared filesystem, and one that sees all parts there commits the checkpoint.

With ``--checkpoint-replicas 1`` the next node keeps a copy too, so that a lost node's part is not lost. The node with
group rank 0 names the checkpoint that is replicated next, by a folder ``.replica-…`` beside the committed ones; each
node sends its part, and writes a file there. Parts go over TCP between agents: both ends prove with an HMAC that they
know the run's secret, and each frame carries one of its own.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath

from msgspec import Struct

from hpc_elastic.base.codec import Mac, UnreadableRecordError, dumps, load, loads, save
from hpc_elastic.base.files import ask_about
from hpc_elastic.checkpoints import folders
from hpc_elastic.checkpoints.folders import (
    COPY,
    INDEX_NAME,
    REPLICA,
    WHOLE,
    CopiedFile,
    Index,
    Manifest,
    NodePart,
    Saving,
    remove,
    walk,
)
from hpc_elastic.errors import HpcElasticError, describe_error

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20


class CopyError(HpcElasticError):
    template = "{name}: {why}"


def copy_part(source: Path, files: Path, *, tag: str, pace: Callable[[int], object]) -> dict[str, CopiedFile]:
    """Each file is there under its name when it is whole and on the disk. `tag` names this copier's temporary files;
    `pace` is called with the bytes that were just read, and may wait, or raise to stop.
    """
    found = {}
    for name in walk(source):
        target = files / name
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name[:100]}.{tag}")
        try:
            found[name] = copy_file(source / name, temporary, pace)
            os.rename(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    _sync(files)
    return found


def copy_file(source: Path, target: Path, pace: Callable[[int], object]) -> CopiedFile:
    with open(source, "rb", buffering=0) as reader, open(target, "wb", buffering=0) as writer:
        size = crc = 0
        while chunk := reader.read(_CHUNK):
            view = memoryview(chunk)
            while view:
                view = view[writer.write(view) :]
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
            pace(len(chunk))
        os.fsync(writer.fileno())
    return CopiedFile(size, crc)


def manifest_path(target: Path, index: int, *, without: bool = False) -> Path:
    return target / "parts" / f"part-{index:05d}{'.without' if without else ''}.json"


def commit(shared: Path, target: Path, saving: Saving, run_id: str) -> Index | None:
    """Whoever sees all parts may do it; the first one wins. None: another node has done it, or a manifest can't be read
    yet. CopyError: two nodes wrote different files of the same name.
    """
    files: dict[str, CopiedFile] = {}
    for index in range(saving.count):
        manifest = load(manifest_path(target, index), Manifest)
        if not isinstance(manifest, Manifest):
            return None
        for name, facts in manifest.files.items():
            if files.setdefault(name, facts) != facts:
                raise CopyError(name=name, why="two nodes wrote different files of this name; put the rank into it")
    found = Index(run_id=run_id, saving=saving, files=files)
    try:
        save(target / "files" / INDEX_NAME, found, durable=True)
        os.rename(target / "files", shared / f"step-{saving.step}")
    except FileNotFoundError:
        return None
    _sync(shared)
    remove(target)
    return found


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_HELLO_SECONDS, _ANSWER_SECONDS = 5.0, 60.0
_MOST_HEADER = 64 << 20
_NONCE_BYTES, _MAC_BYTES = 16, 32


class ReplicaRefusedError(ConnectionError):
    """The other end is no agent of this run, or does not take what is sent."""


class Header(Struct, frozen=True, kw_only=True):
    part: NodePart
    owner: str
    """The uid of the agent whose part it is."""
    files: tuple[tuple[str, int], ...]


class Channel:
    def __init__(self, connection: socket.socket, secret: Mac, *, is_server: bool) -> None:
        """Raises OSError: the other end is another program, or does not answer."""
        self._connection = connection
        connection.settimeout(_HELLO_SECONDS)
        mine = os.urandom(_NONCE_BYTES)
        connection.sendall(mine)
        other = self._read(_NONCE_BYTES)
        nonces = mine + other if is_server else other + mine
        names = (b"server", b"client") if is_server else (b"client", b"server")
        connection.sendall(secret.of(names[0] + nonces))
        if not secret.verifies(self._read(_MAC_BYTES), names[1] + nonces):
            raise ReplicaRefusedError("the other end does not know this run's secret")
        self._keys = [Mac(secret.of(name + b" to other" + nonces)) for name in names]
        self._counts = [0, 0]
        connection.settimeout(_ANSWER_SECONDS)

    def send(self, data: bytes) -> None:
        code = self._keys[0].of(self._counts[0].to_bytes(8, "big") + data)
        self._counts[0] += 1
        self._connection.sendall(len(data).to_bytes(4, "big") + code + data)

    def receive(self, most: int) -> bytes:
        head = self._read(4 + _MAC_BYTES)
        length = int.from_bytes(head[:4], "big")
        if length > most:
            raise ReplicaRefusedError(f"a frame of {length} bytes, where {most} are the most")
        data = self._read(length)
        if not self._keys[1].verifies(head[4:], self._counts[1].to_bytes(8, "big") + data):
            raise ReplicaRefusedError("a frame that the other end did not send")
        self._counts[1] += 1
        return data

    def _read(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            piece = self._connection.recv(min(_CHUNK, count - len(found)))
            if not piece:
                raise ReplicaRefusedError("the other end closed the connection")
            found += piece
        return bytes(found)


class ReplicaServer:
    def __init__(self, local: Path, addresses: Sequence[str], secret: bytes, *, room: int) -> None:
        """Raises OSError: no address of this node can be listened at."""
        self._local, self._secret, self._room = local, Mac(secret), room
        self._socket = _listen(addresses)
        host, port = self._socket.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._thread = threading.Thread(target=self._run, name="replicas-in", daemon=True)
        self._thread.start()

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # close alone does not end an accept
        except OSError:
            pass
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError:
                return
            with connection:
                try:
                    self._take(Channel(connection, self._secret, is_server=True))
                except (OSError, ValueError) as error:
                    logger.warning("a replica from %s was not taken: %s", address[0], error)

    def _take(self, channel: Channel) -> None:
        header = loads(Header, channel.receive(_MOST_HEADER))
        name = header.part.name(COPY)
        incoming = self._local / f".incoming-{name}"
        files = [(_checked(path), length) for path, length in header.files]
        size = sum(length for _, length in files)
        if folders.bytes_in(self._local) + size > self._room:
            channel.send(b"there is no room for it")
            return
        channel.send(b"")
        remove(incoming)
        folder = incoming / f"step-{header.part.saving.step}"
        folder.mkdir(mode=0o700, parents=True)
        try:
            for path, length in files:
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with open(target, "xb") as file:
                    while length > 0:
                        data = channel.receive(min(_CHUNK, length))
                        if not data:
                            raise ReplicaRefusedError("an empty frame")
                        file.write(data)
                        length -= len(data)
            (incoming / "owner").write_text(header.owner)
            remove(self._local / name)  # the same, where its sender died before it noted the answer
            os.rename(incoming, self._local / name)
        except OSError as error:
            remove(incoming)
            channel.send(describe_error(error).encode()[:1000])
            raise
        channel.send(b"")


def send_part(address: str, secret: bytes, part: NodePart, *, owner: str, folder: Path) -> None:
    host, _, port = address.rpartition(":")
    names = list(walk(folder))
    files = [(name, (folder / name).stat().st_size) for name in names]
    with socket.create_connection((host, int(port)), timeout=_HELLO_SECONDS) as connection:
        channel = Channel(connection, Mac(secret), is_server=False)
        channel.send(dumps(Header(part=part, owner=owner, files=tuple(files))).encode())
        if answer := channel.receive(1000).decode("utf-8", "replace"):
            raise ReplicaRefusedError(f"{address}: {answer}")
        for name, size in files:
            with open(folder / name, "rb") as file:
                while size > 0 and (data := file.read(min(_CHUNK, size))):
                    channel.send(data)
                    size -= len(data)
            if size:
                raise ReplicaRefusedError(f"{name} became shorter")
        if answer := channel.receive(1000).decode("utf-8", "replace"):
            raise ReplicaRefusedError(f"{address}: {answer}")


class Replicator:
    def __init__(self, local: Path, shared: Path, run_uid: str, send: Callable[[NodePart, Path], None]) -> None:
        """`send` raises OSError."""
        self._local, self._shared, self._run_uid, self._send = local, shared, run_uid, send
        self._finished: tuple[int, Saving] | None = None

    def tick(self, index: int) -> None:
        """Do what can be done now. Raises OSError: the shared filesystem refuses."""
        whole = [part for part in folders.parts_in(self._local, WHOLE) if part.index == index]
        if not whole or self._finished == (index, whole[-1].saving):
            return
        newest = whole[-1].saving
        ask_about(self._shared)
        named = folders.targets_in(self._shared, self._run_uid, prefix=REPLICA)
        if index == 0:
            named = self._name_next(named, newest)
        for part in whole:
            folder = self._folder(part.saving)
            mark = folder / f"part-{part.index:05d}"
            if part.saving not in named or mark.exists():
                continue
            try:
                self._send(part, folders.files_of(part, WHOLE, self._local))
            except OSError as error:  # the others go on: this node's part alone has no copy
                logger.warning("step %d was not replicated: %s", part.saving.step, error)
            try:
                mark.touch()
            except FileNotFoundError:
                pass  # a newer one has been named meanwhile
        marks = folders.names_in(self._folder(newest))
        is_alone = index != 0 or (named == [newest] and len(marks) >= newest.count)
        if is_alone and f"part-{index:05d}" in marks:
            self._finished = index, newest

    def _name_next(self, named: list[Saving], newest: Saving) -> list[Saving]:
        done = [saving for saving in named if len(folders.names_in(self._folder(saving))) >= saving.count]
        place = newest.attempt, newest.round
        open_ones = [one for one in named if one not in done and (one.attempt, one.round) == place]
        kept = [*open_ones, *done[-1:]]
        for saving in named:
            if saving not in kept:
                remove(self._folder(saving))
        if not open_ones and newest not in named:
            self._folder(newest).mkdir(parents=True, exist_ok=True)
            kept.append(newest)
        return kept

    def _folder(self, saving: Saving) -> Path:
        return self._shared / saving.target(self._run_uid, prefix=REPLICA)


def _listen(addresses: Iterable[str]) -> socket.socket:
    failed: OSError = OSError("this node has no address")
    for address in addresses:
        try:
            return socket.create_server((address, 0), backlog=4)
        except OSError as error:
            failed = error
    raise failed


def _checked(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts:
        raise UnreadableRecordError(f"a file's name {name!r} leads out of the folder")
    return path

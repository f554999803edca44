"""A part goes to the neighbour whole, from an agent of the run alone, or not at all."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_elastic.base.codec import Mac, dumps
from hpc_elastic.checkpoints.copying import Channel, Header, ReplicaRefusedError, ReplicaServer, send_part
from hpc_elastic.checkpoints.folders import COPY, NodePart, Saving, files_of

SECRET = b"s" * 32
PART = NodePart(Saving(20, 0, 0, 2), 1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReplicaServer]:
    (tmp_path / "local").mkdir()
    found = ReplicaServer(tmp_path / "local", ["127.0.0.1"], SECRET, room=4 << 20)
    yield found
    found.close()


def part_of(folder: Path, **files: bytes) -> Path:
    (folder / "own" / "deep").mkdir(parents=True)
    for name, data in files.items():
        (folder / "own" / name.replace("_", "/")).write_bytes(data)
    return folder / "own"


def connect(server: ReplicaServer, secret: bytes) -> Channel:
    host, port = server.address.split(":")
    return Channel(socket.create_connection((host, int(port)), timeout=10), Mac(secret), is_server=False)


def test_a_part_arrives_with_its_owner(server: ReplicaServer, tmp_path: Path) -> None:
    data = os.urandom(1_500_000)
    own = part_of(tmp_path, model=data, deep_empty=b"")
    send_part(server.address, SECRET, PART, owner="n1", folder=own)
    found = files_of(PART, COPY, tmp_path / "local")
    assert (found / "model").read_bytes() == data
    assert (found / "deep" / "empty").read_bytes() == b""
    assert (found.parent / "owner").read_text() == "n1"


def test_nobody_else_is_heard(server: ReplicaServer, tmp_path: Path) -> None:
    with pytest.raises(OSError):
        send_part(server.address, b"x" * 32, PART, owner="n1", folder=part_of(tmp_path, model=b"1"))
    send_part(server.address, SECRET, PART, owner="n1", folder=tmp_path / "own")
    assert os.listdir(tmp_path / "local") == [PART.name(COPY)]


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil", ""])
def test_no_file_is_written_elsewhere(server: ReplicaServer, tmp_path: Path, name: str) -> None:
    channel = connect(server, SECRET)
    channel.send(dumps(Header(part=PART, owner="n1", files=((name, 1),))).encode())
    with pytest.raises(OSError):
        channel.receive(1000)
    assert not [path for path in (tmp_path / "local").rglob("*") if path.is_file()]


def test_what_has_no_room_is_refused(server: ReplicaServer, tmp_path: Path) -> None:
    with pytest.raises(ReplicaRefusedError, match="no room"):
        send_part(server.address, SECRET, PART, owner="n1", folder=part_of(tmp_path, model=bytes(5 << 20)))


def test_a_sender_that_dies_leaves_no_copy(server: ReplicaServer, tmp_path: Path) -> None:
    channel = connect(server, SECRET)
    channel.send(dumps(Header(part=PART, owner="n1", files=(("model", 100),))).encode())
    del channel
    send_part(server.address, SECRET, PART, owner="n1", folder=part_of(tmp_path, model=b"whole"))
    assert (files_of(PART, COPY, tmp_path / "local") / "model").read_bytes() == b"whole"

"""What psutil and the kernel say of this host, its processes and addresses, with what is raised taken for "unknown"."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpc_elastic.base import host_facts
from hpc_elastic.base.host_facts import (
    available_memory,
    candidate_addresses,
    choose_master_address,
    command_line,
    links,
)


def test_the_arguments_of_a_process_are_as_it_was_given_them() -> None:
    words = command_line(os.getpid())
    assert words[1:] == sys.orig_argv[1:]


@pytest.mark.parametrize(
    "error", [psutil.NoSuchProcess(7), psutil.ZombieProcess(7), psutil.AccessDenied(7), PermissionError()]
)
def test_a_process_that_is_gone_or_hidden_has_no_arguments(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> list[str]:
        raise error

    monkeypatch.setattr(psutil.Process, "cmdline", refuse)
    assert command_line(os.getpid()) == []
    monkeypatch.setattr(psutil, "Process", refuse)
    assert command_line(7) == []


def test_memory_is_what_the_kernel_calls_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("Buffers", "Cached", "Shmem", "Active", "Inactive", "Slab", "SReclaimable")
    fields = {"MemTotal": 8 << 20, "MemFree": 100, "MemAvailable": 1 << 20, **dict.fromkeys(names, 0)}
    (tmp_path / "meminfo").write_text("".join(f"{name}: {value} kB\n" for name, value in fields.items()))
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert available_memory() == 1 << 30
    for torn in ("", "MemTotal\n", "MemTotal: many kB\n"):
        (tmp_path / "meminfo").write_text(torn)
        assert available_memory() is None


class Entry:
    def __init__(self, address: str, family: int = socket.AF_INET) -> None:
        self.address = address
        self.family = family


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what names resolve to and which interfaces there are; this host is called ``n1``."""

    def build(names: Mapping[str, Sequence[str]], interfaces: Mapping[str, Iterable[Entry]] | None = None) -> None:
        def getaddrinfo(name: str, *_: object) -> list[tuple[object, ...]]:
            if name not in names:
                raise socket.gaierror(-2, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (address, 0)) for address in names[name]]

        monkeypatch.setattr(host_facts.socket, "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(host_facts.socket, "gethostname", lambda: "n1")
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: dict(interfaces or {}))

    return build


ONE = {"eth0": [Entry("10.0.0.1")]}
VIRTUAL = {
    "docker0": [Entry("172.17.0.1")],
    "virbr0": [Entry("192.168.122.1")],
    "br-1a2b": [Entry("172.18.0.1")],
    "veth7": [Entry("172.19.0.1")],
    "ib0": [Entry("fe80::1", socket.AF_INET6), Entry("10.1.0.1")],
    "eth0": [Entry("10.0.0.1")],
    "lo": [Entry("10.9.9.9")],
}


@pytest.mark.parametrize(
    ("name", "names", "interfaces", "addresses"),
    [
        # The node name comes before the host name, and these before interfaces.
        (
            "nid001",
            {"nid001": ["10.0.0.1"], "n1": ["192.168.0.1", "10.0.0.1"]},
            {"eth0": [Entry("172.16.0.1"), Entry("10.0.0.1")]},
            ["10.0.0.1", "192.168.0.1", "172.16.0.1"],
        ),
        # A name that means this very host, as Debian's installer writes it into /etc/hosts.
        *(("n1", {"n1": [f"127.{end}"]}, ONE, ["10.0.0.1"]) for end in ("0.0.1", "0.1.1", "1.2.3")),
        ("no-such-name", {}, ONE, ["10.0.0.1"]),
        ("n1", {}, VIRTUAL, ["10.0.0.1", "10.1.0.1"]),
        ("n1", {"n1": ["127.0.1.1"]}, {"lo": [Entry("127.0.0.1")]}, []),  # no network
    ],
)
def test_the_addresses_that_others_may_reach(
    world: Any, name: str, names: dict[str, list[str]], interfaces: dict[str, list[Entry]], addresses: list[str]
) -> None:
    world(names, interfaces)
    assert candidate_addresses(name) == addresses


@pytest.mark.parametrize(
    ("given", "reached", "candidates", "chosen"),
    [
        ("head.example.org", ["10.0.0.1"], ["10.1.0.1"], "head.example.org"),
        (None, ["10.0.0.1", "10.2.0.1"], ["10.1.0.1"], "10.0.0.1"),
        (None, [], ["10.1.0.1", "10.2.0.1"], "10.1.0.1"),
        (None, [], [], "127.0.0.1"),
        ("", ["10.0.0.1"], [], "10.0.0.1"),
    ],
    ids=["the user's own", "one that a packet reached", "the likeliest", "this host alone", "an empty one is none"],
)
def test_the_master_address(given: str | None, reached: list[str], candidates: list[str], chosen: str) -> None:
    assert choose_master_address(given=given, reached=reached, candidates=candidates) == chosen


@pytest.mark.parametrize("name", ["a..b", "x" * 300, "n\u00fcll\ud800"])
def test_a_name_that_no_resolver_takes_is_passed_over(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [Entry("10.0.0.1")]})
    assert candidate_addresses(name) == ["10.0.0.1"]


def test_the_links_of_the_interfaces_that_others_reach(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world({}, {"eth0": [Entry("10.0.0.1")], "ib0": [Entry("10.9.0.1")], "docker0": [Entry("172.17.0.1")]})
    flags = {b"eth0": 0x1003, b"ib0": 0x1043}

    def ioctl(_: socket.socket, request: int, argument: bytes) -> bytes:
        assert request == 0x8913
        name = argument[:16].rstrip(b"\0")
        return argument[:16] + flags[name].to_bytes(2, "little") + bytes(14)

    monkeypatch.setattr(host_facts.fcntl, "ioctl", ioctl)
    assert links(["10.0.0.1", "10.9.0.1", "10.3.0.1"]) == [("eth0", False), ("ib0", True)]
    assert links(["10.3.0.1"]) == []
    del flags[b"ib0"]
    monkeypatch.setattr(host_facts.fcntl, "ioctl", lambda *_: (_ for _ in ()).throw(OSError("gone")))
    assert links(["10.0.0.1"]) == [], "nobody can say"


def test_the_loopback_has_a_link() -> None:
    """Asked of the kernel itself."""
    assert links(["127.0.0.1"]) in ([("lo", True)], []), "some sandboxes have none"

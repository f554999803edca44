"""The client of NCCL's RAS against a server that speaks its protocol, with every fault of one."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from hpc_elastic.agent import nccl_watch
from hpc_elastic.agent.nccl_watch import NotOursError, ask_ras, choose_address, nccl_version, parse_address
from hpc_elastic.failures.peers import UnreadableReportError, parse_json, serving_socket
from tests.rigs.fake_ras import FakeRas, Fault

DATA = Path(__file__).parents[1] / "data" / "nccl_ras"
JSON = (DATA / "json_2.29_missing.json").read_text()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_watch, "_CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(nccl_watch, "_ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(nccl_watch, "_LONGEST_ANSWER", 4 << 20)


def ask(server: FakeRas, why: str = "") -> str:
    return ask_ras(server.address, world_size=64, why_not_ours=lambda _: why)


def test_json_is_asked_for() -> None:
    with FakeRas(lambda: JSON) as server:
        assert ask(server) == JSON
        assert server.asked == ["CLIENT PROTOCOL 2", "TIMEOUT 5", "SET FORMAT json", "VERBOSE STATUS"]


def test_a_version_before_json_is_asked_for_nothing() -> None:
    with FakeRas(lambda: JSON, knows_json=False) as server:
        with pytest.raises(NotOursError, match=r"before 2\.28\.7"):
            ask(server)
        assert "VERBOSE STATUS" not in server.asked


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault.SLOW, TimeoutError),
        (Fault.DRIPS, TimeoutError),
        (Fault.SILENT, TimeoutError),
        (Fault.REFUSES_STATUS, TimeoutError),
        (Fault.GARBAGE, NotOursError),
        (Fault.HUGE, NotOursError),
    ],
)
def test_a_fault_costs_a_bounded_time(fault: Fault, error: type[Exception]) -> None:
    with FakeRas(lambda: JSON, fault=fault) as server:
        began = time.monotonic()
        with pytest.raises(error):
            ask(server)
        assert time.monotonic() - began < 5.0


def test_half_an_answer_is_unreadable() -> None:
    with FakeRas(lambda: JSON, fault=Fault.CLOSES) as server, pytest.raises(UnreadableReportError):
        parse_json(ask(server))


def test_nobody_listens() -> None:
    server = FakeRas()
    server.close()
    with pytest.raises(OSError, match="refused"):
        ask(server)


def test_another_run_s_process_is_asked_nothing() -> None:
    with FakeRas(lambda: JSON) as server:
        with pytest.raises(NotOursError, match="another run"):
            ask(server, "a process of another run listens there")
        assert "VERBOSE STATUS" not in server.asked


def test_the_socket_at_the_other_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as here:
        there, _ = listener.accept()
        with there:
            found = serving_socket(here)
            assert found is not None
            assert Path(f"/proc/self/fd/{there.fileno()}").readlink() == Path(f"socket:[{found[0]}]")
            assert found[1] == os.geteuid()


def test_each_agent_has_an_address_that_nobody_can_guess_unless_the_user_has_one() -> None:
    found = {choose_address({}) for _ in range(20)}
    assert len(found) > 10
    assert all(parse_address(address) for address in found)
    assert choose_address({"NCCL_RAS_ADDR": "localhost:4"}) == ""
    assert choose_address({"NCCL_RAS_ENABLE": "0"}) == ""


@pytest.mark.parametrize(
    ("text", "address"),
    [("localhost:28028", ("localhost", 28028)), ("[::1]:9", ("::1", 9)), ("host", None), (":8", None), ("a:b", None)],
)
def test_how_an_address_is_written(text: str, address: tuple[str, int] | None) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    ("path", "beside", "version"),
    [
        ("lib/libnccl.so.2.26.5", "", (2, 26, 5)),
        ("site-packages/nvidia/nccl/lib/libnccl.so.2", "nvidia_nccl_cu12-2.27.3.dist-info", (2, 27, 3)),
        ("site-packages/nvidia/nccl/lib/libnccl.so.2", "other-1.2.3.dist-info", None),
        ("lib/libtorch.so", "", None),
    ],
)
def test_which_nccl_a_worker_has_loaded(
    tmp_path: Path, path: str, beside: str, version: tuple[int, int, int] | None
) -> None:
    library = tmp_path / path
    library.parent.mkdir(parents=True)
    if beside:
        (tmp_path / "site-packages" / beside).mkdir()
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "maps").write_text(f"7f00-7f01 r--p 00000000 00:00 0\n7f02-7f03 r-xp 0 fe:01 12    {library}\n")
    assert nccl_version(7, proc=str(tmp_path)) == version
    assert nccl_version(8, proc=str(tmp_path)) is None


def test_the_fixtures_are_what_json_readers_take() -> None:
    for path in DATA.glob("*.json"):
        json.loads(path.read_text())

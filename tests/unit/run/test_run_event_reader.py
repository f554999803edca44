"""Events of all writers as one story."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_elastic.base.files import parse_json
from hpc_elastic.run.event_reader import EventFile, event_line, merged_events
from hpc_elastic.run.paths import AttemptPaths
from tests.rigs.event_pairs import read_events


def write(folder: Path, name: str, *events: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(event) + "\n" for event in events))


def event(name: str, second: float, node: int = 0, **fields: object) -> dict[str, object]:
    head = {"v": 1, "t": int(second * 1e9), "n": 0, "host": f"n{node}", "node": node, "role": "agent"}
    return {**head, "event": name, **fields}


def test_a_clock_that_is_known_to_be_off_is_set_right(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path / "attempt-003")
    write(attempt.events, "agent-00000-a.jsonl", event("second", 20))
    # The node of the event is another one's: it is the writer's clock.
    write(attempt.events, "agent-00001-b.jsonl", event("first", 3610, 0))
    write(attempt.events, "supervisor--0001-c.jsonl", event("third", 30))
    lines = list(merged_events(attempt, {1: 3600 * 10**9}))
    found = [(one.value["event"], one.time_ns // 10**9, one.writer) for one in lines]
    assert {one.attempt for one in lines} == {3}
    assert found == [("first", 10, 1), ("second", 20, 0), ("third", 30, -1)]


def test_lines_across_reads_of_a_file_and_between_garbage(tmp_path: Path) -> None:
    lines = [b'{"event": "a", "t": 1}', b"\xff\xfe", b'{"event": "\xc3\xbc"}', b"[1]", b'{"event": "b"} x', b"{}", b""]
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join([*lines, b'{"event": "torn", "t"']))
    expected = [{"event": "a", "t": 1}, {"event": "\u00fc"}]
    for name in (".hidden.jsonl", "notes.txt"):
        (tmp_path / name).write_text('{"event": "not of a log"}\n')
    (tmp_path / "folder.jsonl").mkdir()
    assert list(read_events(tmp_path)) == expected
    assert [event.value for event in EventFile(path, chunk=7).events()] == expected
    later = {"v": 99, "event": "from the future", "new": {}}
    torn = (b'{"event": "torn"\n"b": 1}', b'{"event": "torn",\n"t": 1}', b'{"event": "torn"}' * 2)
    for garbage in (*torn, b'{"v": 1, "no event": true}', b"\0\0\0\0", b"[" * 200_000):
        path.write_bytes(garbage + f"\n{json.dumps(later)}\n".encode())
        assert list(read_events(tmp_path)) == [later]


HEAD = b'"event": "worker_failed", "role": "agent", "t": 5, "n": 0, "node": 1, "host": "n1", "round": 0, "rank": 2'
ODD_LINES = (
    b"{%b}" % HEAD,
    b'{%b, "message": "\\ud800"}' % HEAD,
    b'{%b, "message": "\xff"}' % HEAD,
    b'{%b, "unknown": NaN}' % HEAD,
    b'{%b, "exitcode": "one", "message": "kept"}' % HEAD,
    b'{%b, "rank": 3.0}' % HEAD,
    b'{%b, "t": "noon", "n": true, "node": 1.0, "host": 7, "by": null}' % HEAD,
    b'{%b, "role": null}' % HEAD,
    b'{%b, "t": 123456789012345678901234567890}' % HEAD,
    b'{"event": "of_a_newer_version", "host": "n1", "t": 4}',
    b'{"event": "agent_ended", "role": "supervisor", "code": 1}',
    b'{%b, "message": "%b"}' % (HEAD, b"x" * 9000),
)


@pytest.mark.parametrize(("other", "names"), [('{"event": "other"}', ["wanted"]), ("no event", None)])
def test_what_stands_behind_a_chunk_without_an_event_is_found(
    tmp_path: Path, other: str, names: list[str] | None
) -> None:
    path = tmp_path / "agent-00000-a.jsonl"
    path.write_text(f"{other}\n" * 9 + '{"event": "wanted"}\n' + f"{other}\n" * 9)
    assert [event.name for event in EventFile(path, names=names, chunk=32).events()] == ["wanted"]


@pytest.mark.parametrize("raw", ODD_LINES)
def test_a_line_reads_as_its_values_do(tmp_path: Path, raw: bytes) -> None:
    """What the fast decoder takes, and what it refuses and the other one reads, are the same event."""
    (tmp_path / "x.jsonl").write_bytes(raw + b"\n")
    ((found,),) = [list(EventFile(tmp_path / "x.jsonl").events())]
    value = parse_json(raw)
    assert found.value == value
    expected = event_line(value)
    assert replace(found, raw=b"", time_ns=0) == replace(expected, raw=b"", time_ns=0)
    assert found.name == value["event"]


def test_of_many_lines_no_values_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time of a large run's report went into dictionaries that nobody looked into."""
    write(tmp_path, "agent-00000-a.jsonl", *(event("workers_started", second, round=second) for second in range(9)))
    monkeypatch.setattr(json, "loads", lambda text, **_: pytest.fail(f"decoded {text}"))
    assert len([line.event for line in EventFile(tmp_path / "agent-00000-a.jsonl").events()]) == 9


def test_times_of_more_than_64_bits_end_there(tmp_path: Path) -> None:
    path = tmp_path / "agent-00000-a.jsonl"
    path.write_text('{"event": "b", "t": ' + "9" * 3000 + ', "n": 1}\n{"event": "b", "t": ' + "9" * 5000 + "}\n")
    assert [line.written_ns for line in EventFile(path).events()] == [(1 << 63) - 1] * 2


def test_what_comes_later_is_read_later(tmp_path: Path) -> None:
    path = tmp_path / "agent-00007-x.jsonl"
    file = EventFile(path)
    assert file.read() is None
    path.write_bytes(b'{"event": "a"}\n{"eve')
    assert [event.name for event in file.read() or ()] == ["a"]
    assert file.read() is None
    assert file.has_begun_line
    with path.open("ab") as end:
        end.write(b'nt": "b", "t": 5}\n{"event": "c", "t": 3}')
    found = file.read() or []
    assert [(event.name, event.writer, event.time_ns, event.raw) for event in found] == [
        ("b", 7, 5, b'{"event": "b", "t": 5}')
    ]
    assert [(event.name, event.time_ns) for event in file.rest() or ()] == [("c", 5)], "never before an earlier line"
    assert file.read() is None


def test_a_line_that_takes_gigabytes_to_decode_is_left_out(tmp_path: Path) -> None:
    """60 MB in one line took 1.7 GB."""
    path = tmp_path / "events" / "x.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"event": "a"}\n{"event": "b", "x": [' + b"[]," * 20_000_000 + b'0]}\n{"event": "c"}\n')
    tracemalloc.start()
    try:
        file = EventFile(path)
        assert [event.name for event in file.events()] == ["a", "c"]
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()
    assert file.left_out() == [
        f"events/x.jsonl: {path.stat().st_size - 30} bytes were left out: a line is longer than 4194304 bytes"
    ]


def test_of_a_large_file_only_the_beginning_and_the_end_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0
    path = tmp_path / "events" / "x.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"event": "a"}\n' * 5000)
    with path.open("r+b") as sparse:
        sparse.seek(2 << 30)
        sparse.write(b'\n{"event": "b"}\n')
    pread = os.pread

    def counted(fd: int, size: int, offset: int) -> bytes:
        nonlocal read
        data = pread(fd, size, offset)
        read += len(data)
        return data

    monkeypatch.setattr(os, "pread", counted)
    file = EventFile(path)
    assert [event.name for event in file.events()] == ["a"] * 5000 + ["b"]
    assert read < 66 << 20
    assert sorted(sentence.partition(" left out: ")[2] for sentence in file.left_out()) == [
        "a line is longer than 4194304 bytes",
        "it is larger than 67108864 bytes",
    ]
    path.write_bytes(b'{"event": "a", "fill": "%s"}\n' % (b"x" * 9_971) * 10_000)
    with path.open("ab") as end:
        end.write(b'{"event": "b"}\n')
    file = EventFile(path)
    found = [event.name for event in file.events()]
    assert found[-1] == "b"
    assert 6_000 < len(found) < 7_000
    (sentence,) = file.left_out()
    assert sentence.startswith("events/x.jsonl: ")
    assert sentence.endswith(" bytes were left out: it is larger than 67108864 bytes")

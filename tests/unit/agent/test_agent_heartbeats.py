"""The agent's side of the heartbeats: where their folder may be, what is read, what is told, when to look again."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.agent import heartbeats
from hpc_elastic.agent.heartbeat_watch import SUMMARY_SECONDS, HeartbeatWatch
from hpc_elastic.agent.heartbeats import (
    FOLDER_VARIABLE,
    PREFIX,
    HeartbeatFolder,
    RankBeat,
    RoundBeats,
    StepPace,
    is_seen_by,
    make_folder,
    open_folder,
    sweep,
)
from hpc_elastic.base.host_facts import filesystem_type
from hpc_elastic.base.loop import FileExecutor
from hpc_elastic.rendezvous.state import HangMark
from hpc_elastic.run.option_values import SectionTimeouts
from hpc_elastic.run.progress import ProgressSource
from hpc_elastic.worker_api.records import (
    COLLECTIVES,
    FILE_BYTES,
    LOSS,
    TOTAL,
    VARIABLE,
    empty_file,
    lease_beside,
    pack_lease,
)
from tests.rigs.fake_clock import FakeClock
from tests.rigs.heartbeat_page import write_record

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:21 / /dev/shm rw,nosuid - tmpfs tmpfs rw
24 22 0:44 / /home rw,relatime - nfs4 server:/home rw
25 22 0:45 / /tmp/with\\040blank rw - lustre x rw
26 22 0:46 / /over rw - nfs4 server:/x rw
27 22 0:47 / /over rw - tmpfs tmpfs rw
"""


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class Inline(FileExecutor):
    """Does at once what is posted."""

    def post(self, action: object) -> None:
        action()  # type: ignore[operator]


# -- the folder


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/dev/shm", "tmpfs"),
        ("/dev/shm/x", "tmpfs"),
        ("/dev/shmx", "ext4"),
        ("/home/me/tmp", "nfs4"),
        ("/tmp", "ext4"),
        ("/tmp/with blank/y", "lustre"),
        ("/over", "tmpfs"),
    ],
)
def test_which_filesystem_a_folder_is_on(tmp_path: Path, path: str, kind: str) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert filesystem_type(path, mountinfo=str(tmp_path / "mountinfo")) == kind


def test_a_page_is_seen_by_processes_of_the_same_mounts(tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.touch()
    assert is_seen_by([os.getpid(), os.getppid(), 2**22 + 1], str(page))
    assert is_seen_by([os.getpid()], str(tmp_path / "none")), "not known"


def test_a_chosen_folder_then_memory_and_never_a_shared_filesystem(tmp_path: Path) -> None:
    shared, local, chosen = tmp_path / "shared", tmp_path / "local", tmp_path / "chosen"
    for path in (shared, local, chosen):
        path.mkdir()
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"1 0 0:1 / {shared} rw - nfs4 s:/x rw\n2 0 0:2 / {local} rw - ext4 /dev/sda rw\n3 0 0:3 / / rw - nfs4 s:/ rw\n"
        f"4 0 0:4 / {chosen} rw - ext4 /dev/sda rw\n"
    )
    env = {"XDG_RUNTIME_DIR": str(shared), "TMPDIR": str(local)}
    for place, more in ((chosen, {FOLDER_VARIABLE: str(chosen)}), (local, {})):
        folder = open_folder("x", env | more, mounts=str(mounts))
        assert folder.path == place / f"{PREFIX}x"
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        folder.remove()
        assert list(place.iterdir()) == []
    assert list(shared.iterdir()) == []
    assert next(iter(heartbeats.candidates({}))) == Path("/dev/shm")


def test_no_place_for_it_is_no_end_of_the_run(tmp_path: Path, clock: FakeClock) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("1 0 0:1 / / rw - nfs4 s:/ rw\n")
    folder = open_folder("x", {}, mounts=str(mounts))
    assert folder.path is None
    watch = make_watch(folder, clock, timeouts=SectionTimeouts(seconds={"setup": 1.0}))
    watch.begin(0, first_rank=0, count=1)
    assert watch.environment(0) == {VARIABLE: ""}
    clock.now += 100
    assert watch.look([0]) is None, "who can't be heard is not judged"


def test_a_folder_that_another_agent_takes_for_a_dead_ones_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, looks = fcntl.lockf, iter([lambda: sweep(tmp_path, PREFIX)])

    def lock_late(fd: int, how: int) -> None:
        next(looks, lambda: None)()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "lockf", lock_late)
    made = make_folder(tmp_path / f"{PREFIX}1")
    assert made.make_file("0-0")[0]
    assert next(looks, None) is None


def test_what_dead_agents_left_goes_and_what_living_ones_have_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "candidates", lambda env: iter([tmp_path]))
    monkeypatch.setattr(heartbeats, "_is_local", lambda base, mounts: True)
    # Another process: a lock is no hindrance to its own holder.
    code = (
        "import sys; from pathlib import Path; from hpc_elastic.agent.heartbeats import make_folder\n"
        f"folder = make_folder(Path({str(tmp_path)!r}) / ('{PREFIX}' + sys.argv[1]))\n"
        "print(flush=True)\nif sys.argv[1] == 'alive': sys.stdin.read()"
    )
    subprocess.run([sys.executable, "-c", code, "dead"], check=True, stdout=subprocess.DEVNULL)
    with subprocess.Popen(
        [sys.executable, "-c", code, "alive"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        (tmp_path / "somebody-elses").mkdir()
        folder = open_folder("mine", {})
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            f"{PREFIX}alive",
            f"{PREFIX}mine",
            "somebody-elses",
        ]
        process.communicate()
    folder.remove()


def test_what_others_have_planted_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 of a stranger's folders took 2 s at each start of an agent."""
    monkeypatch.setattr(heartbeats, "candidates", lambda env: iter([tmp_path]))
    monkeypatch.setattr(heartbeats, "_is_local", lambda base, mounts: True)
    opened: list[Path] = []
    judged = heartbeats.check_private_dir
    monkeypatch.setattr(heartbeats, "check_private_dir", lambda path: opened.append(path) or judged(path))
    for number in range(20):
        (tmp_path / f"{PREFIX}{number}").mkdir(mode=0o700)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    open_folder("mine", {}).remove()
    assert opened == [], "another user's"
    monkeypatch.setattr(os, "geteuid", lambda: own)
    monkeypatch.setattr(heartbeats, "_MOST_NAMES", 7)
    open_folder("mine", {}).remove()
    assert len(opened) == 7, "of very many, some"
    monkeypatch.setattr(heartbeats, "_MOST_ENTRIES", 3)
    open_folder("mine", {}).remove()
    assert len(opened) == 10


# -- reading


def put(
    path: str, count: int, *, at: float, step: int = 3, section: str = "step", intervals: int = 0, **more: int
) -> None:
    buffer = bytearray(Path(path).read_bytes())
    write_record(
        buffer,
        count=count,
        at_ns=int(at * 1e9),
        step=step,
        pid=77,
        section=section.encode(),
        intervals=intervals,
        longest_ns=int(2e9),
        **more,
    )
    Path(path).write_bytes(buffer)


@pytest.fixture
def folder(tmp_path: Path) -> HeartbeatFolder:
    (tmp_path / "beats").mkdir()
    return HeartbeatFolder(tmp_path / "beats")


def test_a_round_begins_in_setup_and_has_files_of_its_own(folder: HeartbeatFolder) -> None:
    one = RoundBeats(folder, round_index=4, first_rank=8, count=2, now=50.0)
    (first, second) = one.read(60.0)
    assert (first.rank, first.section, first.at, first.count, first.step) == (8, "setup", 50.0, 0, None)
    assert second.rank == 9
    for path in one.paths:
        assert os.stat(path).st_size == FILE_BYTES
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert os.stat(path).st_blocks > 0, "written, not only made longer"
    put(one.paths[0], 1, at=55.0)
    again = RoundBeats(folder, round_index=4, first_rank=8, count=2, now=70.0)
    assert again.read(71.0)[0].count == 0
    again.remove()
    assert list(folder.path.iterdir()) == []
    assert again.read(72.0)[0].section == "setup", "a file that is gone says nothing"


def test_all_workers_of_a_round_find_one_lease_beside_their_pages(folder: HeartbeatFolder) -> None:
    beats = RoundBeats(folder, round_index=4, first_rank=8, count=2, now=50.0)
    beats.begin_again(1, 60.0)
    beats.write_lease(7, 8)
    offset, raw = pack_lease(7, 8)
    (file,) = {lease_beside(path) for path in beats.paths}
    assert Path(file).read_bytes() == empty_file()[:offset] + raw + empty_file()[offset + len(raw) :]
    beats.remove()
    assert not Path(file).exists()


def test_when_a_worker_spoke(folder: HeartbeatFolder) -> None:
    beats = RoundBeats(folder, round_index=0, first_rank=0, count=1, now=50.0)
    put(beats.paths[0], 1, at=55.0, step=3, section="load")
    (found,) = beats.read(60.0)
    assert (found.at, found.step, found.section, found.pid, found.count) == (55.0, 3, "load", 77, 1)
    assert beats.read(90.0)[0].at == 55.0
    put(beats.paths[0], 2, at=1e6)
    assert beats.read(100.0)[0].at == 100.0, "a clock that runs ahead: not later than now"
    assert beats.beats[0].age(99.0) == 0.0
    put(beats.paths[0], 3, at=1.0)
    assert beats.read(110.0)[0].at == 100.0, "one that is behind: not sooner than the last look"


# -- watching


def make_watch(folder: HeartbeatFolder, clock: FakeClock, **more: Any) -> HeartbeatWatch:
    return HeartbeatWatch(
        **{"folder": folder, "timeouts": SectionTimeouts(), "clock": clock, "files": Inline(clock=clock), **more}
    )


@pytest.fixture
def summary(tmp_path: Path) -> Path:
    (tmp_path / "attempt").mkdir(mode=0o700)
    return tmp_path / "attempt" / "heartbeats.json"


@pytest.fixture
def watch(folder: HeartbeatFolder, clock: FakeClock, summary: Path) -> HeartbeatWatch:
    timeouts = SectionTimeouts(seconds={"setup": 100.0, "step": 10.0})
    found = make_watch(folder, clock, timeouts=timeouts, summary=summary, node=3, host="n3")
    found.begin(0, first_rank=4, count=2)
    return found


def say(watch: HeartbeatWatch, clock: FakeClock, local_rank: int, count: int, **said: object) -> None:
    put(watch.environment(local_rank)[VARIABLE], count, at=clock.monotonic(), **said)  # type: ignore[arg-type]


def until_due(watch: HeartbeatWatch, clock: FakeClock) -> None:
    clock.now += watch.due - clock.monotonic()


def test_a_hang_is_found_on_time_whatever_section_it_began_in(watch: HeartbeatWatch, clock: FakeClock) -> None:
    """The first look is planned for `setup`; a worker may be in a shorter section long before it is over."""
    started = clock.monotonic()
    clock.now += 3.0
    say(watch, clock, 0, 1, step=7)
    say(watch, clock, 1, 1, step=8)
    assert watch.look([0, 1]) is None
    assert [beat.count for beat in (watch.beat(0), watch.beat(1)) if beat] == [0, 0], "before it is due nothing is read"
    looks = 0
    verdict = None
    while verdict is None:
        until_due(watch, clock)
        looks += 1
        verdict = watch.look([0, 1])
    assert clock.monotonic() - started == pytest.approx(13.0)
    assert looks <= 3
    assert verdict.ranks == (4,)
    assert watch.hung.keys() == {0}
    assert (watch.mark.step, watch.mark.age) == (7, pytest.approx(10.0))
    assert (watch.furthest_step, watch.last_step(0), watch.last_step(1)) == (8, 7, 8)
    assert watch.look([0, 1]) is None, "one verdict a round"


def test_a_timeout_of_a_section_that_is_never_entered_is_said_once(
    folder: HeartbeatFolder, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """By rank 0's node, when it would have run out; with what the script lacks."""
    timeouts = SectionTimeouts(seconds={"setup": 9.0, "checkpoint": 30.0}, learns_step=True)
    watch = make_watch(folder, clock, timeouts=timeouts)
    watch.begin(0, first_rank=0, count=1)
    say(watch, clock, 0, 1, section="evaluate")
    began, said = clock.monotonic(), []
    while clock.monotonic() < began + 200.0:
        until_due(watch, clock)
        assert watch.look([0]) is None
        said += [(round(clock.monotonic() - began), record.message) for record in caplog.records]
        caplog.clear()
    assert [seconds for seconds, _ in said] == [30, 60]
    assert 'put `with hpc_elastic.section("checkpoint"):` around that part of the script' in said[0][1]
    assert "put hpc_elastic.heartbeat(step=step) in each step of the script" in said[1][1]
    watch.begin(1, first_rank=0, count=1)
    clock.now += 100.0
    assert watch.look([0]) is None
    assert not caplog.records


def test_a_worker_that_has_ended_is_not_judged(watch: HeartbeatWatch, clock: FakeClock) -> None:
    say(watch, clock, 0, 1)
    say(watch, clock, 1, 1)
    clock.now += 2.0
    for _ in range(5):
        say(watch, clock, 1, int(clock.monotonic() * 10), step=4)
        until_due(watch, clock)
        assert watch.look([1]) is None


def test_an_agent_that_was_stopped_itself_judges_nobody_for_it(watch: HeartbeatWatch, clock: FakeClock) -> None:
    """A suspended job: all stood still, and the workers need their time again."""
    say(watch, clock, 0, 1)
    say(watch, clock, 1, 1)
    clock.now += 3600.0
    assert watch.look([0, 1]) is None
    until_due(watch, clock)
    assert watch.look([0, 1]) is not None


def test_the_run_directory_learns_of_it_slowly_whatever_the_steps(
    watch: HeartbeatWatch, clock: FakeClock, summary: Path
) -> None:
    writes = 0
    stamp = None
    began = clock.monotonic()
    for count in range(1, 1201):
        clock.now += 0.1
        say(watch, clock, 0, count, step=count)
        say(watch, clock, 1, count, step=count)
        watch.look([0, 1])
        if summary.exists() and summary.stat().st_mtime_ns != stamp:
            stamp = summary.stat().st_mtime_ns
            writes += 1
    assert clock.monotonic() - began == pytest.approx(120.0)
    assert 120 / SUMMARY_SECONDS - 2 <= writes <= 120 / SUMMARY_SECONDS
    value = json.loads(summary.read_text())
    assert (value["version"], value["node"], value["host"], value["round"]) == (1, 3, "n3", 0)
    (first, second) = value["ranks"]
    assert (first["rank"], first["local_rank"], first["section"]) == (4, 0, "step")
    assert first["step"] > 1000
    assert second["age"] <= 0.2
    assert value["steps_per_second"] == pytest.approx(10.0, rel=0.02)
    assert value.get("total") is None


def test_the_summary_of_an_agent_that_died_here_is_kept_beside_the_next_ones(
    watch: HeartbeatWatch, clock: FakeClock, folder: HeartbeatFolder, summary: Path
) -> None:
    say(watch, clock, 0, 1, step=8, first_step=7)
    watch.refresh()
    second = make_watch(folder, clock, summary=summary, node=3)
    for round_index in (1, 2):
        second.begin(round_index, first_rank=4, count=2)
        say(second, clock, 0, 1, step=20 * round_index)
        second.refresh()
    found = {name.name: json.loads(name.read_text()) for name in summary.parent.iterdir()}
    assert {name: value["round"] for name, value in found.items()} == {
        "heartbeats.json": 2, "heartbeats-round-00000.json": 0
    }  # fmt: skip
    assert found["heartbeats-round-00000.json"]["progress"]["step"] == 8


def test_a_checkpoint_and_the_number_of_all_steps_are_in_it(
    watch: HeartbeatWatch, clock: FakeClock, summary: Path
) -> None:
    now_ns = int(clock.monotonic() * 1e9)
    for local_rank in (0, 1):
        say(watch, clock, local_rank, 1, step=8, checkpoints=1, saved_ns=now_ns, saved_step=7 + local_rank)
        with open(watch.environment(local_rank)[VARIABLE], "r+b") as file:
            page = bytearray(file.read())
            TOTAL.write(page, 500)
            LOSS.write(page, 0.5)
            file.seek(0)
            file.write(page)
    clock.now += 4.0
    watch.refresh()
    value = json.loads(summary.read_text())
    assert (value["total"], value["loss"]) == (500, 0.5)
    assert [(beat["saved_step"], beat["saved_age"]) for beat in value["ranks"]] == [(7, 4.0), (8, 4.0)]


def test_the_pace_is_that_of_the_last_minute() -> None:
    pace = StepPace()
    for now in range(0, 200, 15):
        step = now if now < 100 else 100 + 3 * (now - 100)
        pace.add([RankBeat(rank=0, local_rank=0, section="step", at=0.0, step=step)], float(now))
    assert pace.steps_per_second == pytest.approx(3.0)
    for _ in range(10):
        pace.add([RankBeat(rank=0, local_rank=0, section="step", at=0.0, step=385)], 195.1)
    assert pace.steps_per_second == pytest.approx(3.0, rel=0.02), "looks in quick succession are one"


def test_who_never_speaks_costs_no_file_and_at_the_end_the_folder_goes(
    watch: HeartbeatWatch, clock: FakeClock, folder: HeartbeatFolder, summary: Path
) -> None:
    until_due(watch, clock)
    watch.look([0, 1])
    watch.refresh()
    assert not summary.exists()
    path = Path(str(folder.path))
    watch.close()
    assert not path.exists()
    assert watch.due is None


def test_what_the_kernel_shows_is_written_as_it_changes(watch: HeartbeatWatch, clock: FakeClock, summary: Path) -> None:
    began = clock.monotonic()
    written: list[float] = []
    for since in (None, None, began + 100.0, began + 100.0, None):
        clock.now += 60.0
        watch.note_idle(since)
        if summary.exists():
            written.append(json.loads(summary.read_text())["progress"]["resting"])
            summary.unlink()
    assert written == [0.0, 80.0, 0.0]
    assert watch.progress().source is ProgressSource.KERNEL


def collect(watch: HeartbeatWatch, clock: FakeClock, local_rank: int, done: int, *, is_final: bool = False) -> None:
    """A worker has completed so many collectives."""
    path, now_ns = Path(watch.environment(local_rank)[VARIABLE]), int(clock.monotonic() * 1e9)
    page = bytearray(path.read_bytes())
    COLLECTIVES.write(page, done, now_ns, now_ns, is_final)
    path.write_bytes(page)


def test_collectives_are_progress_where_no_step_is_known(
    watch: HeartbeatWatch, clock: FakeClock, summary: Path
) -> None:
    clock.now += 20.0
    collect(watch, clock, 0, 12)
    collect(watch, clock, 1, 11)
    clock.now += 3.0
    watch.refresh()
    progress = watch.progress()
    assert (progress.source, progress.counted_steps) == (ProgressSource.COLLECTIVES, 12)
    ranks = json.loads(summary.read_text())["ranks"]
    assert [(beat["counted_steps"], beat["source"], beat["age"], beat["section"]) for beat in ranks] == [
        (12, "collectives", 3.0, "setup"), (11, "collectives", 3.0, "setup")
    ]  # fmt: skip
    assert watch.counted_steps == -1, "a worker that is killed may have done more"
    collect(watch, clock, 1, 11, is_final=True)
    watch.refresh()
    assert watch.counted_steps == 11
    say(watch, clock, 0, 1, step=4, is_counted=True)
    watch.refresh()
    assert watch.counted_steps == 4
    watch.begin(1, first_rank=4, count=2)
    collect(watch, clock, 0, 12, is_final=True)
    watch.refresh()
    assert watch.counted_steps == -1, "a round that ends before its first step did none"


@pytest.mark.parametrize(
    ("step", "hung"),
    [
        (7, {0: "no heartbeat for 9.0 s in section 'load' at step 7, while others are at step 8 and wait"}),
        (8, {}),
    ],
)
def test_another_nodes_verdict_shows_who_it_waits_for_here(
    watch: HeartbeatWatch, clock: FakeClock, step: int, hung: dict[int, str]
) -> None:
    say(watch, clock, 0, 1, step=step, section="load")
    say(watch, clock, 1, 1, step=8)
    clock.now += 9.0
    watch.on_hang(HangMark(8, 9.0), [0, 1])
    assert watch.hung == hung
    assert (watch.mark.step if watch.mark is not None else None) == (7 if hung else None)


def test_a_later_round_knows_what_the_earlier_ones_taught(folder: HeartbeatFolder, clock: FakeClock) -> None:
    watch = make_watch(folder, clock, timeouts=SectionTimeouts(learns_step=True))
    watch.begin(0, first_rank=0, count=1)
    say(watch, clock, 0, 30, intervals=30)
    watch.refresh()
    watch.end()
    watch.begin(1, first_rank=0, count=1)
    clock.now += 1.0
    say(watch, clock, 0, 1)
    verdict = None
    began = clock.monotonic()
    while verdict is None and clock.monotonic() < began + 200:
        until_due(watch, clock)
        verdict = watch.look([0])
    assert clock.monotonic() - began == pytest.approx(60.0)


def test_a_round_that_begins_at_the_first_step_again_is_warned_about_once(
    folder: HeartbeatFolder, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    watch = make_watch(folder, clock, furthest_before=152)
    rounds = [(0, 3, 0), (4, 5, 0), (0, 160, 1), (161, 170, 0), (1, 2, 0)]
    warned = []
    for number, (first, last, first_rank) in enumerate(rounds):
        watch.begin(number, first_rank=first_rank, count=1)
        caplog.clear()
        for count in (1, 2):
            say(watch, clock, 0, count, step=last, first_step=first)
            watch.refresh()
        warned.append([record.getMessage() for record in caplog.records])
        watch.end()
    assert [len(lines) for lines in warned] == [1, 0, 0, 0, 1], "where rank 0 is, once"
    assert "training began at step 0 again, after step 152 of an earlier round" in warned[0][0]
    assert "training began at step 1 again, after step 170 of an earlier round" in warned[4][0]

"""What a worker says of itself: what is refused, what is written, and who is not listened to."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpc_elastic
from hpc_elastic.worker_api import heartbeat
from hpc_elastic.worker_api.records import (
    FILE_BYTES,
    LOSS,
    NO_STEP,
    TOTAL,
    VARIABLE,
    HeartbeatRecord,
    empty_file,
    read_record,
    read_sections,
    read_spent,
)
from tests.rigs.heartbeat_page import said, write_record


def test_the_last_word_stands_in_the_file(page: Path) -> None:
    class Whole:
        def __index__(self) -> int:
            return 9

    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    hpc_elastic.heartbeat(step=7)
    first = said(page)
    assert (first.count, first.step, first.section, first.pid) == (1, 7, "step", os.getpid())
    assert before <= first.at_ns <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    hpc_elastic.heartbeat(section="checkpoint")
    second = said(page)
    assert (second.count, second.step, second.section) == (2, 7, "checkpoint")
    hpc_elastic.heartbeat(Whole())
    assert (said(page).step, said(page).section) == (9, "step")


Step = Callable[[Any], None]


@pytest.fixture
def step_of(page: Path, monkeypatch: pytest.MonkeyPatch) -> Step:
    """A step of an optimizer, as torch calls its hooks after it."""
    hooks: list[Callable[[Any, Any, Any], None]] = []
    torch = SimpleNamespace(register_optimizer_step_post_hook=hooks.append)
    monkeypatch.setitem(sys.modules, "torch.optim.optimizer", torch)  # type: ignore[arg-type]
    heartbeat.count_optimizer_steps()
    return lambda optimizer: [hook(optimizer, (), {}) for hook in hooks] and None


def test_steps_of_the_optimizer_count_until_the_script_sends_heartbeats(page: Path, step_of: Step) -> None:
    optimizer = SimpleNamespace()
    for _ in range(3):
        step_of(optimizer)
    counted = said(page)
    assert (counted.step, counted.first_step, counted.count, counted.section) == (3, 1, 3, "step")
    assert counted.is_counted
    child = os.fork()
    if child == 0:
        step_of(optimizer)
        os._exit(0)
    os.waitpid(child, 0)
    assert said(page).step == 3, "a forked child counts none"
    hpc_elastic.heartbeat(step=1000)
    step_of(optimizer)
    own = said(page)
    assert (own.step, own.first_step, own.is_counted) == (1000, 1000, False)


def test_a_heartbeat_before_the_first_step_counts_alone(page: Path, step_of: Step) -> None:
    hpc_elastic.heartbeat()
    step_of(SimpleNamespace())
    assert (said(page).step, said(page).count, said(page).is_counted) == (None, 1, False)


def test_of_several_optimizers_the_one_that_steps_most_often_counts(page: Path, step_of: Step) -> None:
    often, seldom, later = SimpleNamespace(), SimpleNamespace(), SimpleNamespace()
    each = [SimpleNamespace() for _ in range(50)]
    for _ in range(4):
        step_of(often)
        step_of(often)
        step_of(seldom)
    assert said(page).step == 8
    for _ in range(5):
        step_of(later)  # a second phase, with an optimizer of its own
    assert said(page).step == 12
    for _ in range(3):  # one for each parameter: a step of all is one step
        for one in each:
            step_of(one)
    assert said(page).step == 14


def test_a_counted_step_is_no_step_that_a_checkpoint_holds_and_stays_in_its_section(page: Path, step_of: Step) -> None:
    optimizer = SimpleNamespace()
    step_of(optimizer)
    with hpc_elastic.section("checkpoint"):
        step_of(optimizer)
        assert said(page).section == "checkpoint"
    assert (said(page).checkpoints, said(page).saved_step) == (1, None)


def test_a_checkpoint_is_complete_at_the_end_of_its_section_or_when_the_worker_says_so(page: Path) -> None:
    def completed() -> int:
        return said(page).checkpoints

    with hpc_elastic.section("setup-data"):
        pass
    assert (completed(), said(page).saved_ns) == (0, 0)
    with hpc_elastic.section("checkpoint"):
        before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        assert (completed(), said(page).section) == (0, "checkpoint")
    assert completed() == 1
    assert before <= said(page).saved_ns <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    with pytest.raises(OSError, match="no space"), hpc_elastic.section("checkpoint"):
        raise OSError("no space left")
    assert completed() == 1, "one that failed is none"
    hpc_elastic.heartbeat(step=5, section="evaluation")
    hpc_elastic.checkpoint_done()
    assert (completed(), said(page).section, said(page).step) == (2, "evaluation", 5)
    hpc_elastic.heartbeat(step=6)
    assert completed() == 2, "a later word keeps what was said"


def test_a_section_and_checkpoint_done_beside_its_end_are_one_checkpoint(page: Path) -> None:
    for step in (5, 6, 7):
        hpc_elastic.heartbeat(step)
        with hpc_elastic.section("checkpoint"):
            if step == 5:
                hpc_elastic.checkpoint_done(step)
        if step == 6:
            hpc_elastic.checkpoint_done(step + 1)  # of a script that counts the steps that are done
        assert said(page).checkpoints == step - 4
    assert said(page).saved_step == 7
    with hpc_elastic.section("checkpoint"):
        pass
    assert said(page).checkpoints == 4, "saved again, as after a notice"
    hpc_elastic.checkpoint_done(20)
    assert said(page).checkpoints == 5, "a thread of its own has written another one"


def in_a_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_a_checkpoint_holds_the_step_at_which_its_save_began(page: Path) -> None:
    hpc_elastic.heartbeat(step=5)
    with hpc_elastic.section("checkpoint"):
        hpc_elastic.heartbeat(step=8)  # by whichever thread
    assert said(page).saved_step == 5
    hpc_elastic.checkpoint_done()
    assert said(page).saved_step == 8
    with hpc_elastic.section("checkpoint", step=7):
        pass
    assert (said(page).saved_step, said(page).checkpoints) == (8, 3), "the furthest stays"
    hpc_elastic.checkpoint_done(20)
    assert said(page).saved_step == 20


def test_of_a_save_beside_the_training_only_the_given_step_is_known(page: Path) -> None:
    hpc_elastic.heartbeat(step=70)

    def save(**step: int) -> None:
        with hpc_elastic.section("checkpoint", **step):
            hpc_elastic.heartbeat()
        hpc_elastic.checkpoint_done(**step)

    in_a_thread(save)
    assert (said(page).saved_step, said(page).checkpoints) == (None, 1)
    in_a_thread(lambda: save(step=60))
    assert (said(page).saved_step, said(page).checkpoints) == (60, 2)
    in_a_thread(lambda: (hpc_elastic.heartbeat(step=71), hpc_elastic.checkpoint_done()))
    assert said(page).saved_step == 71, "it is the thread that trains"


@pytest.mark.parametrize(
    ("record", "name", "values"), [(TOTAL, "total", (100, 200)), (LOSS, "loss", (0.25, float("inf")))]
)
def test_the_number_of_all_steps_and_the_loss_stand_beside_the_records(
    page: Path, record: Any, name: str, values: tuple[float, float]
) -> None:
    hpc_elastic.heartbeat(1)
    assert record.read(page.read_bytes()) is None
    hpc_elastic.heartbeat(2, **{name: values[0]})
    hpc_elastic.heartbeat(3)
    assert (record.read(page.read_bytes()), said(page).step) == ((values[0],), 3)
    hpc_elastic.heartbeat(4, **{name: values[1]})
    with pytest.raises(ValueError, match="-1"):
        hpc_elastic.heartbeat(5, total=-1)
    hpc_elastic.heartbeat(5, loss=object())  # a tensor, say, whose GPU nobody is to wait for
    assert record.read(page.read_bytes()) == (values[1],)
    assert record.read(b"") is None
    if record is LOSS:
        torn = bytearray(page.read_bytes())
        torn[90] ^= 1
        assert record.read(bytes(torn)) is None


def test_times_between_steps_are_measured_where_nothing_else_was_done(page: Path) -> None:
    hpc_elastic.heartbeat(step=1)
    hpc_elastic.heartbeat(step=2)
    with hpc_elastic.section("checkpoint"):
        pass
    assert said(page).intervals == 1
    hpc_elastic.heartbeat(step=3)
    assert said(page).intervals == 2
    hpc_elastic.heartbeat(section="eval")
    hpc_elastic.heartbeat(step=4)
    assert said(page).intervals == 2
    assert said(page).longest_ns > 0


def test_sections_nest_and_setup_lasts_until_the_first_heartbeat(page: Path) -> None:
    seen = []
    with hpc_elastic.section("load"):
        seen.append(said(page).section)
    seen.append(said(page).section)
    hpc_elastic.checkpoint_done()
    seen.append(said(page).section)
    assert said(page).checkpoints == 1
    hpc_elastic.heartbeat(step=0)
    with hpc_elastic.section("checkpoint"):
        hpc_elastic.heartbeat(step=1)
        seen.append(said(page).section)
        with pytest.raises(RuntimeError), hpc_elastic.section("upload"):
            seen.append(said(page).section)
            raise RuntimeError
        seen.append(said(page).section)
    seen.append(said(page).section)
    assert seen == ["load", "setup", "setup", "checkpoint", "upload", "checkpoint", "step"]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"step": -1}, ValueError, "step=-1"),
        ({"step": 1 << 63}, ValueError, "2\\*\\*63"),
        ({"step": 1.5}, TypeError, "not float"),
        ({"step": "1"}, TypeError, "not str"),
        ({"step": True}, TypeError, "not a bool"),
        ({"section": ""}, ValueError, "section=''"),
        ({"section": "x" * 33}, ValueError, "1 to 32"),
        ({"section": "two words"}, ValueError, "'two words'"),
        ({"section": "é"}, ValueError, "ASCII"),
        ({"section": 3}, TypeError, "not int"),
        ({"section": b"step"}, TypeError, "not bytes"),
    ],
)
def test_what_cannot_be_right_is_named(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    """Outside of a run too: a typo is to be found where it was made."""
    with pytest.raises(error, match=words):
        hpc_elastic.heartbeat(**arguments)
    if "section" in arguments:
        with pytest.raises(error, match=words):
            hpc_elastic.section(arguments["section"])
    else:
        with pytest.raises(error, match=words):
            hpc_elastic.checkpoint_done(**arguments)
        with pytest.raises(error, match=words):
            hpc_elastic.section("checkpoint", **arguments)


@pytest.mark.parametrize("kind", ["unset", "empty", "gone", "foreign", "folder", "link"])
def test_no_run_no_heartbeat(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "reporter", heartbeat._Reporter())
    path = tmp_path / "page"
    if kind == "foreign":
        path.write_bytes(b"x" * FILE_BYTES)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "real").write_bytes(empty_file())
        path.symlink_to(tmp_path / "real")
    if kind == "unset":
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, "" if kind == "empty" else str(path))
    hpc_elastic.heartbeat(step=1)
    with hpc_elastic.section("checkpoint"):
        hpc_elastic.heartbeat()
    assert heartbeat.reporter._map is None
    if kind == "foreign":
        assert path.read_bytes() == b"x" * FILE_BYTES
    if kind == "link":
        assert (tmp_path / "real").read_bytes() == empty_file()


def test_a_process_that_is_not_the_worker_is_not_listened_to(page: Path) -> None:
    """Of a worker's processes one speaks: a helper that goes on beating would hide that the worker hangs."""
    hpc_elastic.heartbeat(step=1)
    code = "import hpc_elastic; hpc_elastic.heartbeat(step=99)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    assert said(page).step == 1
    pid = os.fork()
    if pid == 0:
        hpc_elastic.heartbeat(step=98)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert said(page).step == 1
    hpc_elastic.heartbeat(step=2)
    assert said(page).step == 2


def test_a_worker_that_replaces_another_one_in_the_same_shell_is_heard(page: Path) -> None:
    code = "import hpc_elastic\nfor n in range(5): hpc_elastic.heartbeat(step=n)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    assert (said(page).step, said(page).count) == (4, 5)
    hpc_elastic.heartbeat(step=0)
    assert (said(page).step, said(page).pid) == (0, os.getpid())


def test_daemonic_processes_of_multiprocessing_stay_silent(page: Path) -> None:
    """A data loader's worker that page before its worker does must not take its place."""
    code = (
        "import multiprocessing as m, hpc_elastic\n"
        "p = m.get_context('fork').Process(target=hpc_elastic.heartbeat, args=(5,), daemon=True)\n"
        "p.start(); p.join(); raise SystemExit(p.exitcode)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    assert read_record(page.read_bytes()) is None


def test_threads_may_all_beat(page: Path) -> None:
    def many() -> None:
        for step in range(2000):
            hpc_elastic.heartbeat(step=step)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # No lock: a thread that is held up between its count and its write may write over a newer record.
    assert 7990 < said(page).count <= 8000


def test_the_lock_goes_with_the_process_that_speaks(page: Path) -> None:
    hpc_elastic.heartbeat(step=1)
    code = (
        f"import fcntl, os, sys; fd = os.open({str(page)!r}, os.O_RDWR)\n"
        "try: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\nexcept OSError: sys.exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 7


# -- the record


def put(buffer: bytearray, count: int, step: int = NO_STEP, section: bytes = b"step") -> None:
    write_record(buffer, count=count, at_ns=count, step=step, pid=1, section=section, intervals=0, longest_ns=0)


def test_an_empty_file_says_nothing() -> None:
    assert read_record(empty_file()) is None
    assert read_record(b"") is None
    assert read_record(os.urandom(FILE_BYTES)) is None


@given(cut=st.integers(0, 200), garbage=st.randoms(use_true_random=False), count=st.integers(2, 1 << 40))
def test_a_record_that_is_being_written_is_never_misread(cut: int, garbage: random.Random, count: int) -> None:
    """Whatever part of the new copy is there, the reader finds the old record or the new one."""
    before = bytearray(empty_file())
    put(before, count - 1, step=count - 1)
    after = bytearray(before)
    put(after, count, step=count)
    changed = [at for at in range(len(after)) if after[at] != before[at]]
    torn = bytearray(before)
    for at in garbage.sample(changed, min(cut, len(changed))):
        torn[at] = after[at]
    record = read_record(bytes(torn))
    assert record.step in (count - 1, count)
    assert record.count == record.step
    assert (record.step == count) == (torn == after)


@given(
    count=st.integers(1, 1 << 60),
    step=st.integers(-1, (1 << 63) - 1),
    name=st.text("abcXYZ019_.-", min_size=1, max_size=32),
)
def test_a_record_comes_back_as_it_was_written(count: int, step: int, name: str) -> None:
    buffer = bytearray(empty_file())
    put(buffer, count, step, name.encode())
    assert read_record(bytes(buffer)) == HeartbeatRecord(
        count=count,
        at_ns=count,
        step=None if step < 0 else step,
        pid=1,
        section=name,
        intervals=0,
        longest_ns=0,
    )


# -- what it costs


def test_importing_the_package_imports_nothing() -> None:
    code = "import sys; before = set(sys.modules); import hpc_elastic; print(*sorted(set(sys.modules) - before))"
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": os.getcwd()}
    )
    assert not set(result.stdout.split()) & {"mmap", "fcntl", "torch", "struct", "hpc_elastic.worker_api.heartbeat"}
    assert "hpc_elastic" in result.stdout.split()


def test_names_that_are_not_there() -> None:
    with pytest.raises(AttributeError, match="hart"):
        hpc_elastic.hart  # noqa: B018
    assert {"heartbeat", "section", "__version__"} <= set(dir(hpc_elastic))


def test_a_heartbeat_costs_microseconds(page: Path) -> None:
    """At most 5 µs: measured as the best of many, so that the machine's other work is left out."""
    hpc_elastic.heartbeat(step=0)
    best = float("inf")
    for _ in range(20):
        started = time.process_time()
        for step in range(500):
            hpc_elastic.heartbeat(step=step)
        best = min(best, (time.process_time() - started) / 500)
    assert best <= 5e-6


def test_the_page_has_what_the_goodput_needs(page: Path) -> None:
    """The first step and when, time in checkpoints, and at steps that were done again."""
    hpc_elastic.heartbeat(step=5)
    first = said(page)
    assert (first.first_step, first.first_ns, first.stepped_ns) == (5, first.at_ns, first.at_ns)
    hpc_elastic.heartbeat(step=6)
    with hpc_elastic.section("checkpoint"):
        entered = said(page).at_ns
    done = said(page)
    assert (done.checkpoint_ns, done.redone_ns) == (done.at_ns - entered, 0)
    hpc_elastic.heartbeat(step=6)  # as it ends
    assert said(page).redone_ns == 0
    before = said(page).stepped_ns
    hpc_elastic.heartbeat(step=5)
    again = said(page)
    assert again.redone_ns == again.at_ns - before > 0
    hpc_elastic.heartbeat(step=7)
    assert (said(page).first_step, said(page).redone_ns) == (5, again.redone_ns)


def test_the_page_has_the_time_in_each_section(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(0, 10**12, 10**9))
    monkeypatch.setattr(heartbeat, "clock_gettime_ns", lambda clock: next(times))
    assert read_spent(page.read_bytes()) == {}
    for _ in range(2):
        hpc_elastic.heartbeat()
        with hpc_elastic.section("data"):
            hpc_elastic.heartbeat()
    spent = read_spent(page.read_bytes())
    assert spent["data"] == 4 * 1.0
    assert spent["step"] == 3 * 1.0


def test_the_page_names_every_section_that_was_entered(page: Path) -> None:
    assert read_sections(page.read_bytes()) == ()
    hpc_elastic.heartbeat(step=1)
    with hpc_elastic.section("checkpoint"), hpc_elastic.section("upload"):
        pass
    hpc_elastic.heartbeat(step=2)
    assert read_sections(page.read_bytes()) == ("step", "checkpoint", "upload")
    for number in range(13):
        assert read_sections(page.read_bytes()) is not None
        hpc_elastic.heartbeat(section=f"s{number}")
    assert read_sections(page.read_bytes()) is None, "too many to know"

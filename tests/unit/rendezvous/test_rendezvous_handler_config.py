"""What a user may write: keys, a URL, and the messages where it is wrong; and what is removed of earlier runs."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.rendezvous.handler_config import (
    ABANDONED_SECONDS,
    CLOSED_SECONDS,
    KEPT_EPOCHS,
    OUTLIVED_SECONDS,
    REMOVALS_PER_SECOND,
    WATCH_SECONDS,
    EpochSweep,
    HandlerConfig,
    RunFolder,
    config_from_keys,
    config_from_url,
    on_this_node,
    participant_settings,
    remove_epoch,
    why_remove,
)
from hpc_elastic.rendezvous.succession import close_run
from hpc_elastic.run.paths import Outcome
from hpc_elastic.store.file_store import FileStore
from tests.rigs.fake_clock import FakeClock


def test_a_url_says_it_all(tmp_path: Path) -> None:
    url = f"fs://{tmp_path}/a%2Fb%20%C3%BC?min_workers=1&max_workers=3&timeout=60&last_call_timeout=2.5&prefix=p%2Fq"
    url += "&reopen=on"
    config = config_from_url(url)
    assert (config.directory, config.run_id, config.prefix) == (str(tmp_path), "a/b ü", "p/q")
    assert config.reopen
    assert (config.min_nodes, config.max_nodes) == (1, 3)
    assert (config.settings.timeout, config.settings.last_call_timeout) == (60, 2.5)


def test_as_many_nodes_as_must_come_may_come(tmp_path: Path) -> None:
    for query, nodes in (("", (1, 1)), ("?min_workers=4", (4, 4))):
        config = config_from_url(f"fs://{tmp_path}/run{query}")
        assert (config.min_nodes, config.max_nodes) == nodes


def test_a_url_is_taken_on_this_node(tmp_path: Path) -> None:
    """Its name in messages, its notifier, and under Slurm its place in the order and the start of the job."""
    slurm = {"SLURM_PROCID": "3", "SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2", "SLURM_STEP_ID": "0"}
    config = config_from_url(f"fs://{tmp_path}/run", slurm)
    assert (config.host, config.node, config.job) == (socket.gethostname(), 3, "17.2.0")
    assert config.addresses
    elsewhere = config_from_url(f"fs://{tmp_path}/run", {"SLURM_PROCID": "10000"})
    assert (elsewhere.node, elsewhere.job) == (None, ""), "from 10000 on, numbers are those of second agents"
    assert on_this_node(config, {}, address="10.0.0.7").addresses == ("10.0.0.7",)


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        ("/run?tiemout=3", "rendezvous URL: unknown key 'tiemout'"),
        ("/run?timeout=soon", "rendezvous URL timeout=soon: not a number"),
        ("/run?timeout=", "timeout=: not a number"),
        ("/run?reopen=yes", "rendezvous URL reopen=yes: give on or off"),
        ("/run?min_workers=two", "min_workers=two"),
        ("/run?min_workers=3&max_workers=2", "min 3 and max 2"),
        ("/run?min_workers=0", "min_workers=0"),
        ("/", "run id is empty"),
        ("/missing/run", "missing is not there"),
    ],
)
def test_a_wrong_url_is_refused_by_name(tmp_path: Path, tail: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        config_from_url(f"fs://{tmp_path}{tail}")
    assert message in str(caught.value)


@pytest.mark.parametrize("url", ["etcd://host:2379/run", "fs://host/run", "/shared/run", ""])
def test_another_kind_of_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="fs:///shared/dir"):
        config_from_url(url)


def test_keys_are_refused_by_name_too(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--rdzv-conf: unknown key 'is_host'"):
        config_from_keys(str(tmp_path), "run", min_nodes=1, max_nodes=1, conf={"is_host": "1"})
    with pytest.raises(UsageError, match="'shared': give an absolute path"):
        config_from_keys("shared", "run", min_nodes=1, max_nodes=1, conf={})


def test_too_few_nodes_close_nothing_for_agents_that_have_their_own_timeout(tmp_path: Path) -> None:
    settings = participant_settings(config_from_url(f"fs://{tmp_path}/run?min_workers=2&max_workers=5&timeout=10"))
    assert (settings.min_nodes, settings.max_nodes, settings.expected_nodes) == (2, 5, 5)
    assert not settings.give_up
    assert settings.timeout < 10


# -- what earlier runs of an id left: when it may go, and what is never touched


STOP = threading.Event()


@pytest.mark.parametrize(
    ("closed", "followers", "unchanged", "goes"),
    [
        (True, 0, 1e9, False),
        (False, 0, 1e9, False),
        (True, 1, CLOSED_SECONDS - 1, False),
        (True, 1, CLOSED_SECONDS, True),
        (False, 1, CLOSED_SECONDS, False),
        (False, 1, ABANDONED_SECONDS, True),
        (True, KEPT_EPOCHS, OUTLIVED_SECONDS, True),
        (True, KEPT_EPOCHS, OUTLIVED_SECONDS - 1, False),
        (True, KEPT_EPOCHS - 1, OUTLIVED_SECONDS, False),
        (False, KEPT_EPOCHS, OUTLIVED_SECONDS, False),
    ],
)
def test_when_an_epoch_may_go(closed: bool, followers: int, unchanged: float, goes: bool) -> None:
    assert (why_remove(closed=closed, followers=followers, unchanged=unchanged) is not None) is goes


class Runs:
    """A run id that was used and closed several times, and is in use now."""

    def __init__(self, tmp_path: Path, used: int) -> None:
        self.clock = FakeClock()
        tmp_path.chmod(0o700)
        self.folder = RunFolder(
            HandlerConfig(directory=str(tmp_path), run_id="my/run", min_nodes=1, max_nodes=1, reopen=True), self.clock
        )
        for _ in range(used):
            epoch = self.folder.current_epoch()
            store = self.folder.enter(epoch)
            store.overwrite("hb/00000-a-1-a", "1 x")
            store.put_if_absent("round/000000/join+00000-a-1-a", "in")
            store.put_if_absent("kv/000000/key/open", "open")
            store.put_if_absent("kv/000000/key/long", "x" * 5000)
            close_run(store, "my/run", Outcome.SUCCEEDED, "done")
        self.now = self.folder.enter(self.folder.current_epoch())
        self.now.put_if_absent("place/00000", "what is going on")

    def sweep(self) -> EpochSweep:
        return EpochSweep(self.folder, self.clock)

    @property
    def left(self) -> list[str]:
        return sorted(os.listdir(self.folder.path))


def test_a_closed_epoch_goes_an_hour_later_and_the_one_in_use_stays(tmp_path: Path) -> None:
    runs = Runs(tmp_path, 1)
    sweep = runs.sweep()
    assert runs.left == ["epoch-000001", "epoch-000002"]
    waited = 0.0
    while sweep.step(STOP):
        runs.clock.now += WATCH_SECONDS
        waited += WATCH_SECONDS
    assert CLOSED_SECONDS <= waited < CLOSED_SECONDS + 2 * WATCH_SECONDS
    assert runs.left == ["epoch-000002"]
    assert runs.now.get("place/00000") == "what is going on"
    assert runs.folder.current_epoch() == 2


def test_short_jobs_leave_no_more_than_a_few(tmp_path: Path) -> None:
    runs = Runs(tmp_path, 12)
    sweep = runs.sweep()
    for _ in range(int(OUTLIVED_SECONDS / WATCH_SECONDS) + 2):
        sweep.step(STOP)
        runs.clock.now += WATCH_SECONDS
    assert len(runs.left) == KEPT_EPOCHS
    assert runs.left[-1] == "epoch-000013"


def test_a_heartbeat_that_changes_keeps_an_epoch(tmp_path: Path) -> None:
    runs = Runs(tmp_path, 1)
    sweep = runs.sweep()
    old = FileStore(Path(runs.folder.epoch_path(1)), clock=runs.clock)
    for beat in range(int(2 * CLOSED_SECONDS / WATCH_SECONDS)):
        if beat % 100 == 0:
            old.overwrite("hb/00000-a-1-a", f"{beat} x")
        sweep.step(STOP)
        runs.clock.now += WATCH_SECONDS
    assert runs.left == ["epoch-000001", "epoch-000002"]


def test_no_link_is_followed_and_nothing_of_others_is_touched(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("keep")
    (outside / "log").mkdir()
    epoch = tmp_path / "epoch-000001"
    store = FileStore(epoch, clock=FakeClock())
    store.put_if_absent("log/0000000000000001", "x")
    store.put_if_absent("round/000000/join+x", "in")
    os.symlink(outside, epoch / "kv")
    os.symlink(outside, epoch / "round" / "000001")
    os.symlink(outside / "precious", epoch / "round" / "000000" / "link")
    (epoch / "thesis").mkdir()
    (epoch / "thesis" / "chapter.tex").write_text("keep")
    (epoch / "notes.txt").write_text("keep")
    os.mkfifo(epoch / "log" / "pipe")
    assert not remove_epoch(str(epoch), clock=FakeClock(), stop=STOP)
    assert (outside / "precious").read_text() == "keep"
    assert (outside / "log").is_dir()
    assert (epoch / "thesis" / "chapter.tex").read_text() == "keep"
    assert (epoch / "notes.txt").read_text() == "keep"
    assert sorted(os.listdir(epoch)) == ["kv", "log", "notes.txt", "thesis"]
    assert os.listdir(epoch / "log") == ["pipe"]
    link = tmp_path / "link"
    os.symlink(outside, link)
    assert not remove_epoch(str(link), clock=FakeClock(), stop=STOP)
    assert (outside / "precious").exists()


def test_what_somebody_has_open_stays_and_the_rest_goes(tmp_path: Path) -> None:
    epoch = tmp_path / "epoch-000001"
    store = FileStore(epoch, clock=FakeClock())
    store.put_if_absent("log/0000000000000001", "x")
    store.overwrite("hb/a", "1 x")
    (epoch / "hb" / ".nfs000000000000abcd00000001").write_text("open elsewhere")
    (epoch / "log" / ".0123456789abcdef").symlink_to("stir")
    (epoch / ".0123456789abcdef").symlink_to("stir")
    assert not remove_epoch(str(epoch), clock=FakeClock(), stop=STOP)
    assert sorted(str(p.relative_to(epoch)) for p in epoch.rglob("*")) == ["hb", "hb/.nfs000000000000abcd00000001"]
    (epoch / "hb" / ".nfs000000000000abcd00000001").unlink()
    assert remove_epoch(str(epoch), clock=FakeClock(), stop=STOP)
    assert not epoch.exists()
    assert remove_epoch(str(epoch), clock=FakeClock(), stop=STOP), "somebody else was quicker"


def test_so_many_files_a_second_and_none_after_a_stop(tmp_path: Path) -> None:
    epoch = tmp_path / "epoch-000001"
    clock = FakeClock()
    store = FileStore(epoch, clock=clock)
    for index in range(120):
        store.put_if_absent(f"round/000000/join+{index:05d}", "in")
    before = clock.now
    stopped = threading.Event()
    stopped.set()
    assert not remove_epoch(str(epoch), clock=clock, stop=stopped)
    assert len(store.list("round/000000")) == 120
    assert remove_epoch(str(epoch), clock=clock, stop=STOP)
    assert clock.now - before >= 120 / REMOVALS_PER_SECOND - 0.01

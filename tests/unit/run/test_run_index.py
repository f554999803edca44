"""Runs by path, run id and job id."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.run import index as module
from hpc_elastic.run.index import entries, find, make_account_folder, record


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}


def make_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    return folder


def remember(env: dict[str, str], run_dir: Path, *, job: str = "12", when: int = 5, cluster: str = "a") -> None:
    assert record(cluster=cluster, job_id=job, submitted_ns=when, run_dir=run_dir, env=env) is None


def test_by_path_and_by_what_lies_in_it(tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "runs" / "r1")
    rank = run / "attempt-000" / "round-000" / "rank-00000"
    rank.mkdir(parents=True)
    monkeypatch.chdir(run)
    with pytest.raises(UsageError, match="job 12: no such run"):
        find("12", env=env)
    monkeypatch.chdir(tmp_path)
    for text in (str(run), "runs/r1", "runs/r1/", str(run / "run.json"), str(rank)):
        assert find(text, env=env) == run


def test_by_run_id_or_its_beginning(tmp_path: Path, env: dict[str, str]) -> None:
    runs = tmp_path / "elsewhere"
    make_run(runs / "run-a"), make_run(runs / "run-b")
    first, second = make_run(runs / "20261121-a"), make_run(runs / "20261122-b")
    assert find("20261121-a", runs, env=env) == first
    assert find("20261122-", runs, env=env) == second
    with pytest.raises(UsageError, match="run- begins 2 runs"):
        find("run-", runs, env=env)


def test_by_job_id_the_newest_wins(tmp_path: Path, env: dict[str, str]) -> None:
    old, new = make_run(tmp_path / "old"), make_run(tmp_path / "new")
    remember(env, old, when=5)
    remember(env, new, when=6)
    remember(env, old, job="121", when=9)
    assert find("12", tmp_path, env=env) == new
    assert [entry.run_dir for entry in entries("12", env=env)] == [new, old]
    assert find("121", tmp_path, env=env) == old
    # Array tasks and clusters are told apart.
    remember(env, old, job="12_1")
    remember(env, new, job="12_2", cluster="b")
    assert find("12_1", env=env) == old
    assert entries("12_2", cluster="a", env=env) == []
    assert [entry.cluster for entry in entries("12_2", cluster="b", env=env)] == ["b"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("99", "job 99: no such run"),
        ("absent", "absent: no such run"),
        ("/absent/x", "/absent/x: no such run"),
        ("12", "the run directory of job 12 no longer exists: {}/gone; "),
        ("12", "scancel -M a 12"),
    ],
)
def test_what_means_nothing_and_a_run_that_is_gone(tmp_path: Path, env: dict[str, str], text: str, says: str) -> None:
    remember(env, tmp_path / "gone")
    with pytest.raises(UsageError) as caught:
        find(text, tmp_path, env=env)
    assert says.format(tmp_path) in str(caught.value)


def test_torn_and_foreign_entries_are_passed_over_and_all_are_private(tmp_path: Path, env: dict[str, str]) -> None:
    run = make_run(tmp_path / "run")
    remember(env, run)
    folder = tmp_path / "state" / "hpc_elastic" / "jobs"
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    (folder / "a-12-9.json").write_text('{"job_id": "12", "clus')
    (folder / "a-12-8.json").write_text('{"job_id": "12", "submitted_ns": "soon"}')
    (folder / "a-12-7.json").write_text("[]")
    assert find("12", env=env) == run


def test_what_can_not_be_written_is_said_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for env in ({"XDG_STATE_HOME": str(tmp_path / "file")}, {}, {"HOME": "relative"}):
        problem = record(cluster="a", job_id="1", submitted_ns=1, run_dir=tmp_path, env=env)
        assert problem
        assert entries("1", env=env) == []


# -- an account's own files: private, and as root never in another user's home

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder to another user needs root")


def test_all_that_is_made_is_this_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = make_account_folder("jobs", {"HOME": str(tmp_path), "XDG_STATE_HOME": "relative"})
    finally:
        os.umask(before)
    assert folder == tmp_path / ".local/state/hpc_elastic/jobs"
    while folder != tmp_path:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folder = folder.parent


@as_root
@pytest.mark.parametrize("case", ["home", "state", "link", "above"])
def test_root_keeps_out_of_another_users_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    home, roots = tmp_path / "home", tmp_path / "root"
    (home / ".local").mkdir(parents=True)
    roots.mkdir()
    env = {"HOME": str(home)}
    if case == "state":
        env["XDG_STATE_HOME"] = str(home / "not" / "there")
    if case == "link":  # what a user makes in a folder that root can write to
        (home / ".local" / "state").symlink_to(roots)
        os.chown(home / ".local" / "state", 12345, 12345, follow_symlinks=False)
    else:
        os.chown(tmp_path / "home", 12345, 12345)
    if case == "above":
        env["HOME"] = str(home / ".local")
    monkeypatch.setattr(module.pwd, "getpwuid", lambda _: type("Entry", (), {"pw_dir": str(roots)}))
    assert make_account_folder("jobs", env) == roots / ".local/state/hpc_elastic/jobs"
    assert sorted(path.name for path in home.rglob("*")) == ([".local", "state"] if case == "link" else [".local"])

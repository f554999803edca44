"""Where an account's own files are: private, and as root never in another user's home."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.run import index as module
from hpc_elastic.run.index import account_folder, make_account_folder

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder to another user needs root")


def test_by_the_state_folder_or_the_home(tmp_path: Path) -> None:
    assert account_folder("jobs", {"XDG_STATE_HOME": f"{tmp_path}/s"}) == tmp_path / "s/hpc_elastic/jobs"
    assert account_folder("jobs", {"HOME": str(tmp_path)}) == tmp_path / ".local/state/hpc_elastic/jobs"
    assert account_folder("jobs", {"HOME": "relative"}) is None
    with pytest.raises(UsageError, match="neither XDG_STATE_HOME nor HOME"):
        make_account_folder("jobs", {})


def test_all_that_is_made_is_this_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = make_account_folder("jobs", {"HOME": str(tmp_path)})
    finally:
        os.umask(before)
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

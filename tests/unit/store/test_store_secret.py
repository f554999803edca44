"""The run's secret: read where it is the owner's alone, refused in one clear line else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_elastic.errors import UnsafePathError, UsageError
from hpc_elastic.store.notifier import read_secret

TEXT = "ab" * 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(TEXT + "\n")
    path.chmod(0o600)
    return path


def test_the_owners_alone_is_read(path: Path) -> None:
    assert read_secret(path) == TEXT.encode()
    path.chmod(0o400)
    assert read_secret(path) == TEXT.encode()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_one_that_others_may_touch_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(UnsafePathError, match=f"mode {mode:04o}") as caught:
        read_secret(path)
    assert str(path) in str(caught.value)


def test_another_users_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(UnsafePathError, match=f"belongs to uid {uid}, not to you"):
        read_secret(path)


def test_a_link_or_a_folder_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    for wrong in (tmp_path / "link", tmp_path):
        with pytest.raises(UnsafePathError, match="not a regular file"):
            read_secret(wrong)


@pytest.mark.parametrize("text", ["", "\n", "short"])
def test_one_that_is_too_short_is_refused(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(UsageError, match="less than 16"):
        read_secret(path)


def test_a_missing_one_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is missing"):
        read_secret(tmp_path / "secret")

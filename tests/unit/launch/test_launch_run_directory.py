"""Run directories: made whole or not at all; and whether other nodes can see a place."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from hpc_elastic.errors import UsageError
from hpc_elastic.launch import run_directory
from hpc_elastic.launch.run_directory import create_run, create_tasks, why_not_shared
from hpc_elastic.run.spec import EntryKind, Entrypoint, RunSpec, load_run_spec
from tests.rigs.specs import make_spec

MOUNTS = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 21 0:26 / /mnt/scratch rw - lustre mds@o2ib:/scratch rw
31 21 0:27 / /home rw - nfs4 server:/home rw
32 31 0:28 / /home/fast\\040disk rw - tmpfs none rw
33 21 0:29 / /over rw - tmpfs none rw
34 21 0:30 / /over rw - nfs4 server:/over rw
torn line
"""


def spec(run_id: str = "r1") -> RunSpec:
    entry = Entrypoint(kind=EntryKind.SCRIPT, target="train.py")
    return make_spec(run_id=run_id, name="n", created_ns=1, entrypoint=entry)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/home/alice/runs", None),
        ("/mnt/scratch/alice", None),
        ("/srv/shared/not/made/yet", None),
        ("/over/runs", None),
        ("/home/fast disk/runs", "tmpfs, in the memory of this machine"),
        ("/tmp/runs", "/tmp is local to each node"),
        ("/var/tmp", "/var/tmp is local to each node"),
        ("/dev/shm/x", "/dev/shm is local to each node"),
        ("/tmpfiles/x", None),
    ],
)
def test_what_other_nodes_see(tmp_path: Path, path: str, why: str | None) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    found = why_not_shared(Path(path), mountinfo=str(mounts))
    assert found == why if why is None else why in (found or "")
    assert why_not_shared(Path("/home/x"), mountinfo=str(tmp_path / "absent")) is None


def test_discarding_takes_away_what_was_made_and_nothing_else(tmp_path: Path) -> None:
    runs = tmp_path / "a" / "b"
    first = create_run(spec("r1"), runs)
    assert load_run_spec(first.paths.run_json) == spec("r1")
    assert first.made == (tmp_path / "a", runs)
    second = create_run(spec("r2"), runs)
    assert second.made == ()
    first.discard()
    assert [path.name for path in runs.iterdir()] == ["r2"]
    second.discard()
    assert list(runs.iterdir()) == []  # it was there before the second run
    first.discard()  # once more is no error
    assert not (tmp_path / "a").exists()


def test_each_task_of_an_array_has_checkpoints_of_its_own(tmp_path: Path) -> None:
    asked = replace(spec(), array="0-1", checkpoint_dir=str(tmp_path / "saved"))
    array = create_run(asked, tmp_path / "runs").paths
    create_tasks(array, asked, (0, 1))
    found = [load_run_spec(array.task(task).run_json).checkpoint_dir for task in (0, 1)]
    assert found == [str(tmp_path / "saved" / "task-0"), str(tmp_path / "saved" / "task-1")]


@pytest.mark.parametrize(
    ("failing", "error", "raised"),
    [
        ("write_private", OSError(28, "No space left on device"), UsageError),
        ("make_private_dir", OSError(28, "No space left on device"), UsageError),
        ("write_private", KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_failure_in_the_middle_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: str,
    error: BaseException,
    raised: type[BaseException],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(run_directory, failing, fail)
    with pytest.raises(raised, match="the disk is full, or your quota is used up" if raised is UsageError else None):
        create_run(spec(), tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("free", "refused"), [(10, True), (300, False), (0, False)])
def test_a_disk_that_is_nearly_full_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, refused: bool
) -> None:
    space = SimpleNamespace(f_bavail=free, f_bfree=free, f_frsize=4096)
    monkeypatch.setattr(run_directory.os, "statvfs", lambda path: space)
    if not refused:
        create_run(spec(), tmp_path / "runs")
        return
    with pytest.raises(UsageError, match="runs has 40 KiB free, too little for a run; free some"):
        create_run(spec(), tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "cluster", "refused"),
    [
        ("saved", "slurm", None),
        ("not/made/yet", "slurm", None),
        ("file", "slurm", "Not a directory"),
        ("file/below", "slurm", "Not a directory"),
        ("/proc/ck", "slurm", "No such file or directory"),
        ("/no-such-mount-here/ck", "slurm", None),  # nodes may have it
        ("/proc/ck", "local", "No such file or directory"),
    ],
)
def test_a_folder_for_checkpoints_that_can_not_be_made_is_refused(
    tmp_path: Path, folder: str, cluster: str, refused: str | None
) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "file").touch()
    asked = replace(spec(), checkpoint_dir=str(tmp_path / folder), cluster=cluster)
    if refused is None:
        create_run(asked, tmp_path / "runs")
        assert list((tmp_path / "saved").iterdir()) == []
        assert not (tmp_path / "not").exists()
        return
    with pytest.raises(UsageError, match=f"--checkpoint-dir {tmp_path / folder}: .*{refused}.*; give") as raised:
        create_run(asked, tmp_path / "runs")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "runs").exists()

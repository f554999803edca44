from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.workers.linux import node_oom_kill_count, oom_kill_count

EVENTS = "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"


def tree(tmp_path: Path, *, cgroup: str, mounts: str, files: dict[str, str]) -> str:
    proc = tmp_path / "proc"
    for pid in ("self", "77"):
        (proc / pid).mkdir(parents=True)
        (proc / pid / "cgroup").write_text(cgroup)
    (proc / "self" / "mountinfo").write_text(mounts.replace("@", str(tmp_path)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return str(proc)


V2 = "30 23 0:26 / @/cg rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / @/cg rw - tmpfs tmpfs rw\n32 31 0:29 / @/cg/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / @/cg/memory rw - cgroup cgroup rw,memory\n38 31 0:35 / @/cg/unified rw - cgroup2 cgroup2 rw\n"
)


def test_of_the_whole_node(tmp_path: Path) -> None:
    assert node_oom_kill_count(proc=str(tmp_path)) is None
    (tmp_path / "vmstat").write_text("nr_free_pages 7\noom_kill 83\n")
    assert node_oom_kill_count(proc=str(tmp_path)) == 83


TASK = "job_1/step_0/task_0"
PART = "30 23 0:26 /docker/abc @/c\\040g rw - cgroup2 cgroup2 rw\n"
OVER = (
    V1.replace(" / @/cg/memory", " /.. @/cg/memory")
    + "80 31 0:96 / @/cg rw - tmpfs cgroup rw\n82 80 0:32 / @/cg/memory rw - cgroup memory rw,memory\n"
)
TWO = "29 23 0:26 /other @/old rw - cgroup2 cgroup2 rw\n30 23 0:26 /docker @/cg rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "count"),
    [
        (f"0::/system.slice/{TASK}\n", V2, {f"cg/system.slice/{TASK}/memory.events": EVENTS}, 2),
        (
            f"9:name=systemd:/x\n4:memory:/slurm/uid_0/{TASK}\n1:cpu:/\n0::/\n",
            V1,
            {f"cg/memory/slurm/uid_0/{TASK}/memory.oom_control": CONTROL},
            5,
        ),
        # A container that sees a part of the tree.
        ("0::/docker/abc/sub\n", PART, {"c g/sub/memory.events": EVENTS}, 2),
        # As seen on a node of the Slurm rig: the machine's mounts are still listed, from above the namespace's top.
        (
            "4:memory:/slurm/job_1\n",
            OVER,
            {"cg/memory/slurm/job_1/memory.oom_control": CONTROL, "cg/memory/memory.oom_control": "oom_kill 0\n"},
            5,
        ),
        # A container's own part of the tree is mounted beside another one's.
        ("0::/docker/abc\n", TWO, {"cg/abc/memory.events": EVENTS, "old/memory.events": "oom_kill 7\n"}, 2),
        # Nothing is known.
        ("0::/\n", V2, {}, None),
        ("0::/a\n", "", {"cg/a/memory.events": EVENTS}, None),
        ("", V2, {"cg/memory.events": EVENTS}, None),
        ("nonsense\n\n", "nonsense - \n", {}, None),
        ("0::/a\n", V2, {"cg/a/memory.events": "oom_kill many\n"}, None),
        ("0::/../a\n", V2, {"cg/memory.events": EVENTS}, None),
        ("0::/a\n", V2.replace(" / ", " /.. "), {"cg/memory.events": EVENTS}, None),
    ],
)
def test_the_kills_of_a_cgroup_are_counted_where_its_files_are_found(
    tmp_path: Path, cgroup: str, mounts: str, files: dict[str, str], count: int | None
) -> None:
    proc = tree(tmp_path, cgroup=cgroup, mounts=mounts, files=files)
    assert oom_kill_count(proc=proc) == oom_kill_count(77, proc=proc) == count


def test_a_process_that_has_gone(tmp_path: Path) -> None:
    assert oom_kill_count(1, proc=str(tmp_path)) is None

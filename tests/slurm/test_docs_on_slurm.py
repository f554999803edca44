"""README's commands alone, in a fresh clone on a cluster, bring a script that was written for torchrun to two nodes.

And what the documentation shows of a cluster's output is what a cluster prints.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.shown_output import ROOT, Session, ShownOutput
from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_cluster.layout import CACHE_FOLDER
from tests.rigs.slurm_cluster.processes import CROWDED
from tests.rigs.slurm_runs import SlurmRuns
from tests.rigs.waiting import until

README = (ROOT / "README.md").read_text(encoding="utf-8")
FOR_TORCHRUN = """
import os, signal, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, state = dist.get_rank(), {"step": 0}
if os.path.exists("mine.pt"):
    state = torch.load("mine.pt", weights_only=True)
print("rank", rank, "of", dist.get_world_size(), "begins at step", state["step"], flush=True)
for step in range(state["step"], 20):
    total = torch.tensor([float(step)])
    dist.all_reduce(total)
    if rank == 0:
        torch.save({"step": step + 1}, "mine.pt.tmp")
        os.replace("mine.pt.tmp", "mine.pt")
    dist.barrier()
    if rank == 1 and step == 9 and not os.path.exists("broken"):
        open("broken", "x").close()
        raise ValueError("the batch of step 9 has no labels")
if rank == 0:
    print("trained", flush=True)
dist.destroy_process_group()
"""
SBATCH = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=0:15:00
export NCCL_DEBUG=INFO
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes=2 --nproc-per-node=1 --rdzv-id=$SLURM_JOB_ID --rdzv-backend=c10d \\
    --rdzv-endpoint=$head:29500 train.py
"""


def readme_commands() -> list[str]:
    """Of the part on clusters, in their order."""
    part = README.partition("\n## On a cluster\n")[2].partition("\n## ")[0]
    fences = re.findall(r"^```console\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
    return [line.removeprefix("$ ") for fence in fences for line in fence.replace("\\\n", "").splitlines()]


class Clone:
    """A fresh clone in a user's folder, and the environment with torch that the user has."""

    def __init__(self, runs: SlurmRuns) -> None:
        self.runs = runs
        self.cluster = runs.cluster
        assert self.cluster.environment is not None
        self.folder = runs.folder / "hpc_elastic"
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).exists():
                shutil.copy2(ROOT / name, target)
        self.environment = runs.folder / "torch-environment"
        # What is the user's own before the first command: a virtual environment with torch and pip.
        self._shell(f"/usr/bin/python3 -m venv --without-pip {self.environment}", cwd=runs.folder)
        (packages,) = self.environment.glob("lib/python3.*/site-packages")
        paths = "".join(f"{path}\n" for path in self.packages())
        (packages / "torch.pth").write_text(paths)
        pip = self.environment / "bin" / "pip"
        pip.write_text(f'#!/bin/sh\nexec {self.environment}/bin/python -m pip "$@"\n')
        pip.chmod(0o755)
        self._shell(f"chown -R {runs.user}: {self.folder} {self.environment}", cwd=runs.folder)

    def packages(self) -> list[Path]:
        """The folders of the rig's packages, torch among them; without this project."""
        environment = self.cluster.environment
        assert environment is not None
        (path,) = environment.folder.glob("venv/lib/python3.*/site-packages/hpc_elastic_rig.pth")
        return [Path(line) for line in path.read_text().split() if Path(line) != environment.source]

    def _shell(self, command: str, *, cwd: Path) -> None:
        self.cluster.run(["sh", "-c", command], user="root", cwd=cwd, check=True)

    def type(self, command: str, *, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        """A command as the user types it."""
        variables = {
            "PATH": f"{self.environment}/bin:/usr/bin:/bin",
            "VIRTUAL_ENV": str(self.environment),
            # The rig has no way out: what pip would get from the index lies here.
            "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(build_tools()), "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }  # fmt: skip
        return self.cluster.run(
            ["bash", "-c", command], user=self.runs.user, cwd=self.folder, env=variables, timeout=timeout * CROWDED
        )


def build_tools() -> Path:
    """What builds the package, for a pip without a network; downloaded once."""
    folder = CACHE_FOLDER / "build-tools"
    if not list(folder.glob("hatchling-*.whl")):
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "-d", str(folder), "hatchling>=1.21,<2", "pip"],
            check=True, timeout=300,
        )  # fmt: skip
        subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
    return folder


@pytest.mark.torch
def test_the_commands_of_the_readme_are_all_that_a_user_needs(
    cluster: SlurmCluster, runs: SlurmRuns, shown_output: ShownOutput
) -> None:
    """Installed, the example trained on two nodes and its killed rank named; then the user's own file and script."""
    clone = Clone(runs)
    commands = readme_commands()
    assert [command.split()[:2] for command in commands] == [
        ["pip", "install"], ["pip", "install"], ["hpc-elastic", "submit"], ["hpc-elastic", "report"],
        ["hpc-elastic", "convert"], ["hpc-elastic", "submit"], ["hpc-elastic", "report"],
    ]  # fmt: skip
    for name, text in {"train.py": FOR_TORCHRUN, "train.sbatch": SBATCH}.items():
        (clone.folder / name).write_text(text)
    done = []
    for command in commands:
        done.append(clone.type(command))
        assert done[-1].returncode == 0, f"{command}\n{done[-1].stdout}{done[-1].stderr}"
    _, _, example, example_report, converted, own, own_report = (run.stdout for run in done)
    assert "final: epoch=10" in example
    assert "on n2 (node 1), round 0" in example_report
    shown_output.check("cluster", Session(output=example_report, folder=runs.folder, shown_as="/home/me"))
    shown_output.check("submit", Session(output=example, folder=runs.folder, shown_as="/home/me"))
    assert converted.startswith("hpc-elastic submit --nodes 2 --time 0:15:00 --setup 'export NCCL_DEBUG=INFO' ")
    assert converted.rstrip().endswith("train.py")
    assert sorted(re.findall(r"rank (\d) of 2 begins at step 10", own)) == ["0", "1"], own
    assert "trained" in own
    assert "ValueError: the batch of step 9 has no labels" in own_report.partition("Recovery")[0]
    assert "rank 1 (local_rank 0) on n2" in own_report
    assert "SUCCEEDED" in own_report
    survived = [found.parent for found in clone.folder.rglob("run.json")]
    assert len(survived) == 2
    until(lambda: not any((root / "latest").is_symlink() for root in survived), "the end of both runs", seconds=60)
    for root in survived:
        files = sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())
        assert len(files) <= 12, " ".join(files)
        assert len(list(root.rglob("*"))) - len(files) < 8

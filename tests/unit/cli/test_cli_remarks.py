"""What is shown before a run begins: the plan, remarks on what is probably a mistake, and refusals."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpc_elastic.cli.main import main
from hpc_elastic.cli.submit import plan_text, remarks
from hpc_elastic.errors import UsageError
from hpc_elastic.options import job_options
from hpc_elastic.options.job_options import notice_seconds
from hpc_elastic.options.run_request import ALL_OPTIONS, build_spec
from hpc_elastic.options.table import parse

ENV = {"PATH": os.environ.get("PATH", "")}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("print()")
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("no program")
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\necho tool 1.0\n")
    tool.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def remarks_on(here: Path, *argv: str, cluster: str = "slurm") -> list[str]:
    parsed = parse(argv, ALL_OPTIONS, refused={})
    nodes = job_options.asked_nodes(parsed)
    spec = build_spec(parsed, cluster=cluster, nodes=nodes, cwd=here, env=ENV, grace=notice_seconds(parsed))
    job_options.sbatch_options(parsed, nodes=nodes, job_name="x", grace=120)
    return list(remarks(parsed, spec, env=ENV))


@pytest.mark.parametrize(
    ("argv", "begins"),
    [
        (["train.py", "--nodes", "4"], "--nodes comes after train.py, so it is an argument of the script"),
        (["train.py", "--max_restarts=1"], "--max_restarts comes after train.py"),
        (["--export", "NCCL_DEBUG=INFO", "train.py"], "--export NCCL_DEBUG=INFO: Slurm then keeps everything else"),
        (["--export=HOME,X=1", "train.py"], "--export HOME,X=1: "),
        (["--sbatch-arg=--no-requeue", "train.py"], "--sbatch-arg --no-requeue: the job can't be requeued"),
        (["--no-python", "torchrun", "train.py"], "torchrun starts workers of its own"),
        (["--no-python", "accelerate", "launch", "train.py"], "accelerate starts workers of its own"),
        (["--no-python", "python3", "-m", "torch.distributed.run", "x"], "python -m torch.distributed.run starts"),
        (["-m", "torch.distributed.run", "train.py"], "python -m torch.distributed.run starts"),
        (["--python", "/only/on/the/nodes/python", "train.py"], "--python /only/on/the/nodes/python: there is no"),
        (["--health-check", "gpu-burn-in --fast", "train.py"], "--health-check gpu-burn-in: there is no such program"),
        (["--container-image", "enroot:torch", "train.py"], "--container-image enroot:torch: enroot is not in PATH"),
    ],
)
def test_what_is_probably_a_mistake(here: Path, argv: list[str], begins: str) -> None:
    (line,) = remarks_on(here, *argv)
    assert line.startswith(begins)


@pytest.mark.parametrize(
    "argv",
    [
        ["--nodes", "2", "train.py", "--nodes", "4"],
        ["train.py", "--lr", "0.1", "-N", "4", "nodes"],
        ["--export", "ALL,NCCL_DEBUG=INFO", "train.py"],
        ["--export", "NONE", "train.py"],
        ["--no-python", "accelerate", "config"],
        ["--no-python", "python3", "-m", "train"],
        ["--python", sys.executable, "--health-check", "./tool --fast", "train.py"],
        ["--python", "python3", "train.py"],
    ],
)
def test_what_is_meant_brings_no_remark(here: Path, argv: list[str]) -> None:
    assert remarks_on(here, *argv) == []


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--python", "./tool", "train.py"], r"--python ./tool: not a Python interpreter \(.*tool -c"),
        (["--python", "./absent", "train.py"], "--python ./absent: no such program in /"),
        (["--python", "folder/", "train.py"], "--python folder/: is a folder"),
        (["--health-check", "./text", "train.py"], r"--health-check ./text: is not executable; run: chmod \+x ./text"),
        (["-N", "4", "--sbatch-arg=--nodes=3", "train.py"], "--sbatch-arg --nodes=3: --nodes 4|-N 4 contradicts it"),
        (["--sbatch-arg=-N3", "train.py"], r"--sbatch-arg -N3: --nodes \(default 1\) contradicts it"),
        (["-t", "10", "--sbatch-arg=--time=20", "train.py"], "--sbatch-arg --time=20: -t 10 contradicts it"),
        (
            ["--container-image", "enroot:torch", "--start-method", "forkserver", "train.py"],
            "forkserver: the fork server runs on the node, and these workers' Python is in the image; leave it out",
        ),
        (["--container-env", "PATH", "train.py"], "--container-env PATH: the workers run in no container"),
        (["--container-image", "enroot:./no.sqsh", "train.py"], "no.sqsh does not exist"),
        (
            ["--container-image", "charliecloud:./folder", "--container-mounts", "/a:/b:ro", "train.py"],
            "charliecloud can't mount /a read-only",
        ),
    ],
)
def test_what_is_refused(here: Path, argv: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        remarks_on(here, *argv)


def test_on_this_machine_a_program_must_be_here(here: Path) -> None:
    with pytest.raises(UsageError, match="--health-check gpu-burn-in: no such program in PATH"):
        remarks_on(here, "--health-check", "gpu-burn-in", "train.py", cluster="local")


def test_several_nodes_on_a_login_node(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine has an sbatch, and this is no job: agents for two nodes would all run right there."""
    sbatch = here / "sbatch"
    sbatch.write_text("#!/bin/sh\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:{ENV['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for argv in (["-N", "2"], ["--spares", "1"]):
        assert main(["run", *argv, "train.py"]) == 2
        assert "use hpc-elastic submit (or salloc first), or say --cluster local" in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_the_plan_has_five_lines(here: Path) -> None:
    argv = ["-N2-4", "--spares=1", "--nproc-per-node=8", "--max-requeues=0", "-p", "gpu", "-t", "10", "train.py"]
    parsed = parse(argv, ALL_OPTIONS, refused={})
    nodes = job_options.asked_nodes(parsed)
    spec = build_spec(parsed, cluster="slurm", nodes=nodes, cwd=here, env=ENV, grace=120)
    options = job_options.sbatch_options(parsed, nodes=nodes, job_name="x", grace=120)
    lines = plan_text(spec, here / "runs" / "r", options).splitlines()
    assert [line[:16].strip() for line in lines] == ["nodes", "runs", "where", "on failure", "run directory"]
    assert lines[0].endswith("2-4 and 1 spare; 8 workers on each")
    assert lines[1].endswith("-u train.py")
    assert lines[2].endswith(f"Slurm, partition gpu, time limit 10, in {here}")
    assert lines[3].endswith("up to 3 restarts within the job; no requeue")
    assert plan_text(spec, here / "r").splitlines()[2].endswith(f"this machine, in {here}")

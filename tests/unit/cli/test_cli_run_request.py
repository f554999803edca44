"""Options → RunSpec and SbatchOptions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.options import job_options, worker_options
from hpc_elastic.options.job_options import notice_seconds
from hpc_elastic.options.resolve import resolve
from hpc_elastic.options.run_request import build_spec, runs_directory, working_directory
from hpc_elastic.options.sbatch import SbatchOptions
from hpc_elastic.options.table import Parsed, parse
from hpc_elastic.run.spec import EntryKind, RunSpec

TABLE = (*worker_options.OPTIONS, *job_options.OPTIONS)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("print()")
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(*argv: str, **env: str) -> Parsed:
    given = parse(argv, TABLE, refused=worker_options.REFUSED, unneeded=worker_options.UNNEEDED)
    return resolve(given, TABLE, env=env, here=Path("/nowhere")).parsed


def spec(here: Path, *argv: str, **env: str) -> RunSpec:
    parsed = read(*argv, **env)
    return build_spec(parsed, cluster="slurm", nodes=(1, 4), cwd=here, env=env, grace=notice_seconds(parsed))


def test_defaults(here: Path) -> None:
    made = spec(here, "train.py", "--lr", "a b")
    assert made.entrypoint.kind is EntryKind.SCRIPT
    assert made.entrypoint.args == ("--lr", "a b")
    assert os.path.isabs(made.entrypoint.python)
    assert (made.name, made.cwd, made.min_nodes, made.max_nodes) == ("train", str(here), 1, 4)
    assert (made.nproc_per_node, made.max_restarts, made.max_requeues, made.requeue) == ("auto", 3, 3, True)
    assert (str(made.redirects), str(made.tee)) == ("0", "0")
    assert made.run_id.endswith(made.run_id[-4:])
    assert made.uid != spec(here, "train.py").uid


def test_without_slurm_auto_and_its_kin_are_resolved_here(here: Path) -> None:
    def local(*argv: str, **env: str) -> str:
        parsed = read(*argv, **env)
        return build_spec(parsed, cluster="local", nodes=(1, 1), cwd=here, env=env, grace=60).nproc_per_node

    cpus = str(len(os.sched_getaffinity(0)))
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    assert local("train.py", **hidden) == "auto", "by default one, or what Slurm gives"
    assert local("--nproc-per-node", "cpu", "train.py") == cpus
    assert local("--nproc-per-node", "auto", "train.py", **hidden) == cpus
    assert local("train.py", PET_NPROC_PER_NODE="auto", **hidden) == cpus
    assert local("--nproc-per-node", "gpu", "train.py", SLURM_JOB_ID="7") == "gpu", "Slurm says how many"
    with pytest.raises(UsageError, match="this machine has no NVIDIA GPU for the workers"):
        local("--nproc-per-node", "gpu", "train.py", **hidden)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["ch-run", "-b", "/a.py:/b", "img", "--", "python3", "/w/train_gpt.py", "--lr", "1"], "train_gpt"),
        (["bwrap", "--bind", "/", "/", "python3.11", "-m", "pkg.pretrain", "x.py"], "pretrain"),
        (["bash", "-c", "source env.sh && exec python -u scripts/train.py --lr 1"], "train"),
        (["bash", "-c", "echo 'unbalanced"], "bash"),
        (["./simulate", "--cfg=a.py"], "simulate"),
    ],
)
def test_a_run_is_named_after_the_script_behind_a_wrapper(here: Path, command: list[str], name: str) -> None:
    (here / "simulate").touch(mode=0o755)
    assert spec(here, "--no-python", *command).name == name


def test_torchruns_newer_options_are_taken(here: Path) -> None:
    made = spec(here, "--virtual-local-rank", "--signals_to_handle=SIGTERM,SIGUSR1", "train.py")
    assert made.virtual_local_rank
    assert (made.signals_to_handle, made.preemption_signal) == (("SIGUSR1",), "SIGUSR1")
    given = spec(here, "--signals-to-handle=usr1,SIGQUIT", "--preemption-signal=USR2", "train.py")
    assert (given.signals_to_handle, given.preemption_signal) == (("SIGUSR1",), "SIGUSR2")
    with pytest.raises(UsageError, match="--signals-to-handle SIGFOO"):
        spec(here, "--signals-to-handle=SIGFOO", "train.py")
    assert not spec(here, "train.py").virtual_local_rank
    assert spec(here, "train.py", PET_VIRTUAL_LOCAL_RANK="1").virtual_local_rank


def test_every_torchrun_option(here: Path) -> None:
    made = spec(
        here,
        *("--nproc_per_node=8", "--max_restarts=7", "--monitor_interval=0.5", "--role", "trainer", "-r", "1"),
        *("--tee=0:3,1:1", "--local_ranks_filter=1,0", "--rdzv_conf=timeout=30,doorbell=off", "--rdzv_id=run7"),
        *("--master_port=29500", "--master-addr=n1", "--start_method=spawn", "--shutdown_timeout=5"),
        "train.py",
    )
    assert (made.nproc_per_node, made.max_restarts, made.monitor_interval, made.role) == ("8", 7, 0.5, "trainer")
    assert (str(made.redirects), str(made.tee), made.local_ranks_filter) == ("1", "0:3,1:1", (0, 1))
    assert made.rdzv_conf == {"timeout": 30.0, "doorbell": False}
    assert (made.run_id, made.master_port, made.master_addr, made.shutdown_timeout) == ("run7", 29500, "n1", 5.0)


def test_pet_variables_are_the_same_options(here: Path) -> None:
    made = spec(here, "train.py", PET_NPROC_PER_NODE="2", PET_MAX_RESTARTS="0", PET_TEE="3", PET_MASTER_PORT="0")
    assert (made.nproc_per_node, made.max_restarts, str(made.tee), made.master_port) == ("2", 0, "3", None)


def test_kinds_of_entrypoint(here: Path) -> None:
    assert spec(here, "-m", "pkg.train", "-x").entrypoint.kind is EntryKind.MODULE
    assert spec(here, "-m", "pkg.train").name == "train"
    command = spec(here, "--no-python", "./tool", "x")
    assert command.entrypoint.kind is EntryKind.COMMAND
    assert command.entrypoint.argv() == ["./tool", "x"]
    assert spec(here, "--no-python", "nvidia-smi").entrypoint.target == "nvidia-smi"


def test_names(here: Path) -> None:
    assert spec(here, "-J", "mine", "train.py").name == "mine"
    assert spec(here, "train.py", SBATCH_JOB_NAME="theirs").name == "theirs"
    assert spec(here, "-J", "mine", "train.py", SBATCH_JOB_NAME="theirs").name == "mine"
    assert spec(here, "--run-id", "a.b-c_1", "train.py").run_id == "a.b-c_1"


def test_requeue(here: Path) -> None:
    assert not spec(here, "--no-requeue", "train.py").requeue
    assert not spec(here, "train.py", SBATCH_NO_REQUEUE="1").requeue
    assert spec(here, "--requeue", "train.py", SBATCH_NO_REQUEUE="1").requeue


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([""], "the script's name is empty"),
        (["sub/absent.py"], "the script sub/absent.py does not exist in"),
        (["train.py/x"], "the script train.py/x can't be read: Not a directory"),
        (["--no-python", "./absent"], "the command ./absent does not exist"),
        (["--no-python", "./train.py"], "the command ./train.py is not executable; run: chmod +x ./train.py"),
        (["--monitor-interval=0", "train.py"], "--monitor-interval 0: give seconds, more than 0"),
        (["--shutdown-timeout=nan", "train.py"], "--shutdown-timeout nan: give seconds"),
        (["--rdzv-id=.x", "train.py"], "--rdzv-id .x: a run id has"),
    ],
)
def test_bad_input_is_named_on_one_line(here: Path, argv: list[str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        spec(here, *argv)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_script_that_can_not_be_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(worker_options, "open", refuse, raising=False)  # root reads everything
    with pytest.raises(UsageError) as caught:
        spec(here, "train.py")
    assert str(caught.value) == "the script train.py can't be read: Permission denied"


def test_sbatchs_options_by_their_short_names() -> None:
    short = "-N2:4 -p gpu -A acc -q high -t 10 -c 8 -C a100 -x n3 -w n1 -d afterok:1 -a 1-3 -o o.txt -e e.txt"
    long = ["--gres=gpu:2", "--gpus-per-node=a100:4", "--mem=4G", "--exclusive", "--reservation=r", "--signal=USR1@9"]
    more = ["--comment=c d", "--mail-type=END", "--mail-user=a@b", "--export=NONE", "--begin=now+1", "--no-requeue"]
    parsed = read(*short.split(), *long, *more, "--sbatch-arg=--nice", "--sbatch_arg", "-L x", "s.py")
    assert job_options.sbatch_options(parsed, nodes=(2, 4), job_name="j", grace=9) == SbatchOptions(
        nodes="2-4", partition="gpu", account="acc", qos="high", time="10", job_name="j", exclude="n3",
        array="1-3", output="o.txt", error="e.txt", gpus_per_node="a100:4", signal="USR1@9", comment="c d",
        requeue=False, grace=9,
        extra=(
            "--cpus-per-task=8", "--nodelist=n1", "--mem=4G", "--export=NONE", "--begin=now+1", "--constraint=a100",
            "--dependency=afterok:1", "--gres=gpu:2", "--mail-type=END", "--mail-user=a@b", "--reservation=r",
            "--exclusive", "--nice", "-L x",
        ),
    )  # fmt: skip


def test_what_means_nothing_without_slurm() -> None:
    parsed = read("-N2", "-p", "gpu", "--time=10", "-J", "n", "--max-restarts=1", "--follow", "s.py")
    assert job_options.only_for_slurm(parsed) == ["-p", "--time", "--follow"]


def test_a_time_that_was_meant_for_tee_is_refused_without_slurm_too() -> None:
    with pytest.raises(UsageError, match=r"-t 0:3: .*--tee 0:3"):
        job_options.only_for_slurm(read("-t", "0:3", "s.py"))


def test_folders(here: Path) -> None:
    (here / "sub").mkdir()
    link = here / "link"
    link.symlink_to(here)
    assert working_directory(read("s"), {"PWD": str(link)}) == link  # the name that people and nodes know
    assert working_directory(read("s"), {"PWD": "/"}) == here
    assert working_directory(read("s"), {}) == here
    assert working_directory(read("-D", "sub", "s"), {"PWD": str(link)}) == link / "sub"
    with pytest.raises(UsageError, match="--chdir absent: no such folder"):
        working_directory(read("-D", "absent", "s"), {})
    assert runs_directory(read("s"), here) == here / "runs"
    assert runs_directory(read("--runs-dir", "../r", "s"), here) == here.parent / "r"
    assert runs_directory(read("--log_dir=/r", "s"), here) == Path("/r")
    assert runs_directory(read("s", PET_LOG_DIR="/logs"), here) == Path("/logs")


@pytest.mark.parametrize(
    ("nodes", "argv", "says"),
    [
        (100_000, ["--nodes=100000"], "--nodes 100000: 100000 nodes on this one machine; it takes at most 256"),
        (257, ["--nodes=2-257"], "--nodes 2-257: 257 nodes on this one machine"),
        (1, ["--spares=256"], "--spares 256: 257 nodes on this one machine"),
        (4, ["--nodes=4", "--nproc-per-node=300"], "--nproc-per-node 300: 1200 workers on this one machine"),
    ],
)
def test_one_machine_is_not_flooded(here: Path, nodes: int, argv: list[str], says: str) -> None:
    parsed = read(*argv, "train.py")

    def made(cluster: str) -> RunSpec:
        return build_spec(parsed, cluster=cluster, nodes=(1, nodes), cwd=here, env={}, grace=notice_seconds(parsed))

    assert made("slurm").max_nodes == nodes
    with pytest.raises(UsageError) as caught:
        made("local")
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("first", ["#!/bin/sh", "#! /bin/bash -l", "#!/usr/bin/env bash", "#!/bin/sh\r"])
def test_a_shell_script_is_not_given_to_python(here: Path, first: str) -> None:
    (here / "job.sbatch").write_text(f"{first}\n#SBATCH --nodes=4\n")
    with pytest.raises(UsageError, match=r"job.sbatch is a shell script.*--no-python"):
        spec(here, "job.sbatch")


@pytest.mark.parametrize(
    ("name", "first"),
    [("train.py", "#!/bin/sh"), ("train", "#!/usr/bin/env python3"), ("train", "#!/opt/sh/bin/python"), ("t", "")],
)
def test_what_may_be_python_is_given_to_it(here: Path, name: str, first: str) -> None:
    (here / name).write_text(f"{first}\n")
    assert spec(here, name).entrypoint.kind is EntryKind.SCRIPT

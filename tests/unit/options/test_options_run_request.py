"""Options → RunSpec: each reaches its field in run.json; what can't be right is refused by name, on one line."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from msgspec.structs import fields

from hpc_elastic.cli.submit import plan_text
from hpc_elastic.errors import UsageError
from hpc_elastic.options import worker_options
from hpc_elastic.options.job_options import notice_seconds
from hpc_elastic.options.resolve import resolve
from hpc_elastic.options.run_request import (
    ALL_OPTIONS,
    REFUSED,
    build_spec,
    runs_directory,
    spec_fields,
    workers_here,
    working_directory,
)
from hpc_elastic.options.table import Option, Parsed, parse
from hpc_elastic.options.worker_options import parse_setup
from hpc_elastic.run.log_pieces import PieceLimit
from hpc_elastic.run.option_values import Check, GrowPolicy, MetricsTarget
from hpc_elastic.run.spec import EntryKind, RendezvousSettings, RunSpec, load_run_spec, settings_from_conf
from tests.rigs.specs import make_spec

CPUS = len(os.sched_getaffinity(0))
FIELDS = {each.name: each for each in fields(RunSpec)}
TRAVELS_AS = {
    "chdir": "cwd",
    "grace": "signal_grace",
    "job_name": "name",
    "module": "entrypoint",
    "no_python": "entrypoint",
    "python": "entrypoint",
}
"""`Option.dest` → the field, where they differ in name or in kind."""
DECIDED = {"array", "cluster", "created_ns", "max_nodes", "min_nodes", "uid"}
"""Fields that no single option gives here: `slurm_job` puts the array's tasks in."""
_IMAGE = "--container-image=enroot:image"
VALUES = {
    "after": "tar c out",
    "bad_nodes": "off",
    "chdir": "elsewhere",
    "checkpoint_bandwidth": "20M",
    "checkpoint_dir": "/shared/checkpoints",
    "checkpoint_local": "/scratch:5G",
    "checkpoint_replicas": "1",
    "container_args": "--rw",
    "container_env": "PATH",
    "container_image": "enroot:image",
    "container_mounts": "/data:/data:ro",
    "container_workdir": "/opt",
    "duplicate_stderr_filters": "nan",
    "duplicate_stdout_filters": "loss,a,,b",
    "hangs": "act:60",
    "health_check": "true --fast",
    "health_checks": "tmp=5G",
    "job_log_ranks": "0-3,8",
    "job_name": "mine",
    "local_ranks_filter": "0,2",
    "log_max_size": "5G",
    "master_addr": "10.0.0.9",
    "metrics": "prometheus:/tmp/a.prom",
    "notify": "https://chat.example.org/hook",
    "nproc_per_node": "7",
    "preemption_signal": "USR1",
    "preload": "auto,json",
    "python": "/opt/python",
    "rdzv_conf": "timeout=77",
    "redirects": "3",
    "role": "trainer",
    "run_id": "run-7",
    "section_timeouts": "setup:900",
    "segment": "2",
    "sbatch_args": "--nice=7",
    "signals_to_handle": "SIGTERM,SIGUSR1",
    "setup": "module load cuda",
    "srun_args": "--nice=7",
    "tee": "3",
    "worker_prefix": "numactl --interleave=all",
}
"""Of options whose metavar does not say what they take."""
TOGETHER = {
    "log_max_files": ("--log-max-size=5G",),
    "preload": ("--start-method=forkserver",),
    **dict.fromkeys(
        ("checkpoint_bandwidth", "checkpoint_keep", "checkpoint_local", "checkpoint_replicas"),
        ("--checkpoint-dir=/shared",),
    ),
    **dict.fromkeys(("container_args", "container_env", "container_mounts", "container_workdir"), (_IMAGE,)),
}
TRAVELLING = [
    option
    for option in ALL_OPTIONS
    if option.dest in FIELDS.keys() - DECIDED or option.dest in TRAVELS_AS or option in worker_options.OPTIONS
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("print()")
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o755)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "train.py").write_text("print()")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(*argv: str, **env: str) -> Parsed:
    given = parse(argv, ALL_OPTIONS, refused=worker_options.REFUSED, unneeded=worker_options.UNNEEDED)
    return resolve(given, ALL_OPTIONS, env=env, here=Path("/nowhere")).parsed


def spec(here: Path, *argv: str, cluster: str = "slurm", nodes: tuple[int, int] = (2, 4), **env: str) -> RunSpec:
    parsed = read(*argv, **env)
    cwd = here / (parsed.get("chdir") or "")
    return build_spec(parsed, cluster=cluster, nodes=nodes, cwd=cwd, env=env, grace=notice_seconds(parsed))


def argument(option: Option) -> str:
    name = option.names[-1]
    if option.metavar is None:
        return name
    if option.dest in VALUES:
        return f"{name}={VALUES[option.dest]}"
    if re.fullmatch(r"[a-z-]+(\|[a-z-]+)+", option.metavar):
        return f"{name}={option.metavar.split('|')[-1]}"
    assert option.metavar in ("N", "K", "SECONDS", "PORT"), f"{name}: give it a value in VALUES"
    return f"{name}=7"


@pytest.mark.parametrize("option", TRAVELLING, ids=lambda option: option.names[-1])
def test_an_option_changes_its_field_of_run_json(option: Option, here: Path) -> None:
    name = TRAVELS_AS.get(option.dest, option.dest)
    assert name in FIELDS, f"{option.names[-1]} is in no field of RunSpec: the agents never see it"
    together = TOGETHER.get(option.dest, ())
    plain, given = spec(here, *together, "train.py"), spec(here, *together, argument(option), "train.py")
    if "--requeue" not in option.names:  # the default
        assert getattr(given, name) != getattr(plain, name)
    given.save(here / "run.json", durable=False)
    assert load_run_spec(here / "run.json") == given


def test_every_field_is_given_by_an_option_or_decided() -> None:
    given = {TRAVELS_AS.get(option.dest, option.dest) for option in TRAVELLING}
    assert FIELDS.keys() == given | DECIDED
    assert {*TRAVELS_AS, *VALUES, *TOGETHER} <= {option.dest for option in ALL_OPTIONS}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], {"name": "train", "min_nodes": 2, "max_nodes": 4, "requeue": True, "virtual_local_rank": False}),
        (["--restart_window=3600"], {"restart_window": 3600.0}),
        (["--grow=now"], {"grow": GrowPolicy.NOW}),
        (["--health-checks=tmp=1K"], {"health_checks": {Check.TMP: 1024.0}}),
        (["--health-check", "/a/b.sh -x", "--health-check-timeout=5"], {"health_check": ("/a/b.sh", "-x")}),
        (["--metrics", "prometheus:/var/x.prom"], {"metrics": MetricsTarget(path="/var/x.prom")}),
        (["--log-max-size=1M"], {"log_limit": PieceLimit(size=1 << 20, count=5)}),
        (["--log-max-size=1G", "--log_max_files=7"], {"log_max_size": 1 << 30, "log_max_files": 7}),
        (["--sbatch-arg=-Lx", "--sbatch-arg=--nice"], {"sbatch_args": ("-Lx", "--nice")}),
        (["--nproc_per_node=8", "--max_restarts=7"], {"nproc_per_node": "8", "max_restarts": 7}),
        (["--monitor_interval=0.5", "--shutdown_timeout=5"], {"monitor_interval": 0.5, "shutdown_timeout": 5.0}),
        (["-r", "1", "--local_ranks_filter=1,0"], {"local_ranks_filter": (0, 1)}),
        (["--rdzv_conf=timeout=30,doorbell=off"], {"rdzv_conf": {"timeout": 30.0, "doorbell": False}}),
        (["--rdzv_id=run7", "--master_port=29500"], {"run_id": "run7", "master_port": 29500}),
        (["--virtual-local-rank"], {"virtual_local_rank": True}),
        (["--signals_to_handle=SIGTERM,SIGUSR1"], {"signals_to_handle": ("SIGUSR1",), "preemption_signal": "SIGUSR1"}),
        (
            ["--signals-to-handle=usr1,SIGQUIT", "--preemption-signal=USR2"],
            {"signals_to_handle": ("SIGUSR1",), "preemption_signal": "SIGUSR2"},
        ),
        (["--run-id", "a.b-c_1"], {"run_id": "a.b-c_1"}),
        (["-J", "mine", "SBATCH_JOB_NAME=theirs"], {"name": "mine"}),
        (["SBATCH_JOB_NAME=theirs"], {"name": "theirs"}),
        (["--no-requeue"], {"requeue": False}),
        (["SBATCH_NO_REQUEUE=1"], {"requeue": False}),
        (["--requeue", "SBATCH_NO_REQUEUE=1"], {"requeue": True}),
        (["PET_NPROC_PER_NODE=2", "PET_MAX_RESTARTS=0"], {"nproc_per_node": "2", "max_restarts": 0}),
        (["PET_VIRTUAL_LOCAL_RANK=1", "PET_MASTER_PORT=0"], {"virtual_local_rank": True, "master_port": None}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_value_of_a_field(here: Path, argv: list[str], expected: dict[str, object]) -> None:
    """Words like A=B are environment variables: sbatch's own, or torchrun's."""
    env = dict(word.split("=", 1) for word in argv if re.match(r"[A-Z]+_", word))
    options = [word for word in argv if not re.match(r"[A-Z]+_", word)]
    made = spec(here, *options, "train.py", **env)
    assert {name: getattr(made, name) for name in expected} == expected


def test_what_is_not_given_is_in_no_field(here: Path) -> None:
    assert spec_fields(parse([], ALL_OPTIONS, refused=REFUSED)) == {}
    assert make_spec().log_limit is None
    assert spec(here, "train.py").uid != spec(here, "train.py").uid
    made = spec(here, "--tee=0:3,1:1", "train.py", PET_TEE="2")
    assert (str(made.redirects), str(made.tee)) == ("0", "0:3,1:1")


@pytest.mark.parametrize(
    ("argv", "kind", "target", "name"),
    [
        (["-m", "pkg.train", "-x"], EntryKind.MODULE, "pkg.train", "train"),
        (["--no-python", "nvidia-smi"], EntryKind.COMMAND, "nvidia-smi", "nvidia-smi"),
        # A run is named after the script behind a wrapper.
        (
            ["--no-python", "ch-run", "-b", "/a.py:/b", "img", "--", "python3", "/w/train_gpt.py", "--lr", "1"],
            EntryKind.COMMAND,
            "ch-run",
            "train_gpt",
        ),
        (
            ["--no-python", "bwrap", "--bind", "/", "/", "python3.11", "-m", "pkg.pretrain", "x.py"],
            EntryKind.COMMAND,
            "bwrap",
            "pretrain",
        ),
        (
            ["--no-python", "bash", "-c", "source env.sh && exec python -u scripts/train.py --lr 1"],
            EntryKind.COMMAND,
            "bash",
            "train",
        ),
        (["--no-python", "bash", "-c", "echo 'unbalanced"], EntryKind.COMMAND, "bash", "bash"),
        (["--no-python", "./tool", "--cfg=a.py"], EntryKind.COMMAND, "./tool", "tool"),
    ],
)
def test_kinds_and_names_of_entrypoints(here: Path, argv: list[str], kind: EntryKind, target: str, name: str) -> None:
    made = spec(here, *argv)
    assert (made.entrypoint.kind, made.entrypoint.target, made.name) == (kind, target, name)


def test_arguments_go_to_the_worker_as_they_are(here: Path) -> None:
    entry = spec(here, "train.py", "--lr", "a b").entrypoint
    assert entry.args == ("--lr", "a b")
    assert entry.argv() == [entry.python, "-u", "train.py", "--lr", "a b"]
    assert os.path.isabs(entry.python)
    assert spec(here, "--no-python", "./tool", "x").entrypoint.argv() == ["./tool", "x"]


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
        (["--signals-to-handle=SIGFOO", "train.py"], "--signals-to-handle SIGFOO"),
        (["--health-check", "'open", "train.py"], "--health-check 'open"),
        (["--metrics", "jsonl:/x", "train.py"], "--metrics 'jsonl:/x': JSON lines were removed; give prometheus:FILE"),
        (["--log-max-size", "0", "train.py"], "--log-max-size 0: give from 64K to"),
        (["--log-max-files", "4", "train.py"], "--log-max-files 4: nothing is rotated without a size; give --log-max"),
        (
            ["--health-checks", "default,network", "train.py"],
            "--health-checks default,network: network was removed; hpc-elastic doctor --nodes N measures it",
        ),
        (["--bad-nodes=jobs", "train.py"], "--bad-nodes jobs: memory across jobs was removed; give run, and"),
        (["--rdzv-id=.x", "train.py"], "--rdzv-id .x: a run id has"),
        (["--run-id=-x", "train.py"], "--run-id -x: a run id has"),
        (["--run-id=task-3", "train.py"], "--run-id task-3: this name is used for folders in a run directory"),
        (
            ["--worker-prefix", "numactl -l", "--start-method", "forkserver", "train.py"],
            "--worker-prefix 'numactl -l': workers that are forks of one process have no command line to put it before",
        ),
    ],
)
def test_what_cannot_be_right_is_named_on_one_line(here: Path, argv: list[str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        spec(here, *argv)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_a_script_that_can_not_be_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(worker_options, "open", refuse, raising=False)  # root reads everything
    with pytest.raises(UsageError) as caught:
        spec(here, "train.py")
    assert str(caught.value) == "the script train.py can't be read: Permission denied"


@pytest.mark.parametrize(
    ("name", "first", "is_python"),
    [
        ("job.sbatch", "#!/bin/sh", False),
        ("job.sbatch", "#! /bin/bash -l", False),
        ("job.sbatch", "#!/usr/bin/env bash", False),
        ("job.sbatch", "#!/bin/sh\r", False),
        ("train.py", "#!/bin/sh", True),
        ("train", "#!/usr/bin/env python3", True),
        ("train", "#!/opt/sh/bin/python", True),
        ("train", "", True),
    ],
)
def test_a_shell_script_is_not_given_to_python(here: Path, name: str, first: str, is_python: bool) -> None:
    (here / name).write_text(f"{first}\n#SBATCH --nodes=4\n")
    if is_python:
        assert spec(here, name).entrypoint.kind is EntryKind.SCRIPT
        return
    with pytest.raises(UsageError, match=r"job.sbatch is a shell script.*--no-python"):
        spec(here, name)


def test_folders(here: Path) -> None:
    link = here / "link"
    link.symlink_to(here)
    assert working_directory(read("s"), {"PWD": str(link)}) == link  # the name that people and nodes know
    assert working_directory(read("s"), {"PWD": "/"}) == here
    assert working_directory(read("s"), {}) == here
    assert working_directory(read("-D", "elsewhere", "s"), {"PWD": str(link)}) == link / "elsewhere"
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
    assert spec(here, *argv, "train.py", nodes=(1, nodes)).max_nodes == nodes
    with pytest.raises(UsageError) as caught:
        spec(here, *argv, "train.py", cluster="local", nodes=(1, nodes))
    assert str(caught.value).startswith(says)


def test_without_slurm_auto_and_its_kin_are_resolved_here(here: Path) -> None:
    def local(*argv: str, **env: str) -> str:
        return spec(here, *argv, "train.py", cluster="local", nodes=(1, 1), **env).nproc_per_node

    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    assert local(**hidden) == "auto", "by default one, or what Slurm gives"
    assert local("--nproc-per-node", "cpu") == str(CPUS)
    assert local("--nproc-per-node", "auto", **hidden) == str(CPUS)
    assert local(PET_NPROC_PER_NODE="auto", **hidden) == str(CPUS)
    assert local("--nproc-per-node", "gpu", SLURM_JOB_ID="7") == "gpu", "Slurm says how many"
    with pytest.raises(UsageError, match="this machine has no NVIDIA GPU for the workers"):
        local("--nproc-per-node", "gpu", **hidden)


@pytest.mark.parametrize(
    ("there", "visible", "gpus"),
    [
        (8, None, 8),
        (8, "0,1", 2),
        (4, "2,7,1", 1),
        (2, "GPU-8932f937,GPU-46a3", 2),
        (1, "0", 1),
        (0, None, 0),
        (None, None, 0),
        (8, "", 0),
        (0, "0,1", 0),
        (4, "-1", 0),
    ],
)
def test_the_machines_gpus_are_counted_as_far_as_they_are_visible(
    tmp_path: Path, there: int | None, visible: str | None, gpus: int
) -> None:
    def workers(asked: str) -> int:
        env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        return workers_here(asked, env, count_gpus=lambda _: there, devices=tmp_path)

    assert workers("cpu") == CPUS
    assert workers("auto") == (gpus or CPUS)
    if gpus:
        assert workers("gpu") == gpus
        return
    with pytest.raises(UsageError, match="--nproc-per-node gpu: this machine has no NVIDIA GPU for the workers"):
        workers("gpu")
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        (tmp_path / name).touch()
    if there is None:
        assert workers("gpu") == 3, "the driver does not answer, and its devices count"


def test_a_setup_file_is_sourced_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    (tmp_path / "my env.sh").write_text("export A=1\n")
    assert parse_setup("my env.sh", "--setup") == f"source '{tmp_path}/my env.sh'"
    for text in ("module load cuda", "source /opt/env.sh", "export A=1", "conda activate a/b"):
        assert parse_setup(text, "--setup") == text
    for text in ("env.sh", "./env", "/lustre/env.bash"):
        with pytest.raises(UsageError, match=re.escape(f"--setup {text}: there is no such file")):
            parse_setup(text, "--setup")


def test_a_reader_sees_what_is_run_and_no_secret(here: Path) -> None:
    hook = "https://chat.example.org/secret"
    made = spec(here, "--setup=module load cuda", f"--notify={hook}", "--worker-prefix=numactl -l", "train.py")
    assert made.around == "--setup 'module load cuda'; --notify https://chat.example.org"
    assert made.command == f"numactl -l {made.entrypoint.python} -u train.py"
    assert f"around it       {made.around}\n" in plan_text(made, Path("/runs/r"))


BASE = RendezvousSettings(min_nodes=2, max_nodes=4, expected_nodes=4)


@pytest.mark.parametrize(
    ("conf", "changes"),
    [
        ("", {}),
        (
            "timeout=90 last_call_timeout=1.5 heartbeat_interval=2 heartbeat_ttl=9 operations_per_second=1500",
            {
                "timeout": 90,
                "last_call_timeout": 1.5,
                "heartbeat_interval": 2,
                "heartbeat_ttl": 9,
                "operations_per_second": 1500,
            },
        ),
        ("doorbell=true", {"doorbell": True}),
        ("doorbell=1", {"doorbell": True}),
        ("doorbell=OFF", {"doorbell": False, "silence_until_lost": BASE.heartbeat_ttl}),
        ("doorbell=0", {"doorbell": False}),
        # A shorter life brings faster beats.
        ("heartbeat_ttl=5", {"heartbeat_ttl": 5, "heartbeat_interval": 1, "silence_until_lost": 5}),
        # A node that looks rarely has time to answer, or it would be out before it could read that it was asked.
        ("poll_interval=10", {"poll_interval": 10, "suspect_answer": 40}),
        ("poll_interval=0.5", {"poll_interval": 0.5, "suspect_answer": BASE.suspect_answer}),
        # Slower beats are missed later.
        ("beat_interval=10", {"beat_silence": 30}),
        ("beat_interval=0.5", {"beat_silence": BASE.beat_silence}),
        ("timeuot=5", ": unknown key 'timeuot'; it knows beat_interval, beat_silence, doorbell, "),
        ("min_nodes=5", ": unknown key 'min_nodes'"),
        ("timeout=soon", " timeout=soon: not a number"),
        ("timeout=", " timeout="),
        ("timeout=0", " timeout=0: give a positive number of seconds"),
        ("timeout=-3", " timeout=-3"),
        ("timeout=nan", " timeout=nan"),
        ("timeout=inf", " timeout=inf"),
        ("doorbell=maybe", " doorbell=maybe: give on or off"),
        ("member_filter=2", " member_filter=2: give on or off"),
        ("heartbeat_interval=15", " heartbeat_ttl=20 must be at least twice heartbeat_interval=15"),
        ("heartbeat_interval=4 heartbeat_ttl=6", " heartbeat_ttl=6 must be at least twice heartbeat_interval=4"),
        ("poll_interval=4 suspect_answer=7", " suspect_answer=7 must be at least twice poll_interval=4"),
        ("suspect_answer=1", " suspect_answer=1 must be at least twice poll_interval=1"),
        ("beat_interval=4 beat_silence=7", " beat_silence=7 must be at least twice beat_interval=4"),
    ],
)
def test_settings_of_the_rendezvous(conf: str, changes: dict[str, object] | str) -> None:
    given = dict(part.split("=") for part in conf.split())
    if isinstance(changes, dict):
        found = settings_from_conf(given, BASE)
        assert {name: getattr(found, name) for name in changes} == changes
        return
    with pytest.raises(UsageError) as caught:
        settings_from_conf(given, BASE)
    assert str(caught.value).startswith(f"--rdzv-conf{changes}")
    assert "\n" not in str(caught.value)

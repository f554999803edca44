"""Every option that holds for the whole run travels in run.json, and every field of run.json comes from somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import fields

from hpc_elastic.options import worker_options
from hpc_elastic.options.job_options import notice_seconds
from hpc_elastic.options.run_request import ALL_OPTIONS, build_spec
from hpc_elastic.options.table import Option, parse
from hpc_elastic.run.spec import RunSpec, load_run_spec

FIELDS = {each.name: each for each in fields(RunSpec)}
TRAVELS_AS = {
    "chdir": "cwd",
    "grace": "signal_grace",
    "job_name": "name",
    "module": "entrypoint",
    "no_python": "entrypoint",
    "python": "entrypoint",
    "sbatch_args": "sbatch_args",
    "srun_args": "srun_args",
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
DERIVED = {"segment": "2"}
TRAVELLING = [
    option
    for option in ALL_OPTIONS
    if option.dest in FIELDS.keys() - DECIDED or option.dest in TRAVELS_AS or option in worker_options.OPTIONS
]


def arguments(option: Option) -> list[str]:
    name = option.names[-1]
    if option.metavar is None:
        return [name]
    if option.dest in VALUES:
        value = VALUES[option.dest]
    elif re.fullmatch(r"[a-z-]+(\|[a-z-]+)+", option.metavar):
        value = option.metavar.split("|")[-1]
    else:
        assert option.metavar in ("N", "K", "SECONDS", "PORT"), f"{name}: give it a value in VALUES"
        value = DERIVED.get(option.dest, "7")
    return [f"{name}={value}"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("print()")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "train.py").write_text("print()")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spec_of(here: Path, *argv: str) -> RunSpec:
    """What is read back from run.json."""
    parsed = parse([*argv, "train.py"], ALL_OPTIONS, refused=worker_options.REFUSED)
    cwd = here / (parsed.get("chdir") or "")
    made = build_spec(parsed, cluster="slurm", nodes=(2, 4), cwd=cwd, env={}, grace=notice_seconds(parsed))
    made.save(here / "run.json", durable=False)
    assert load_run_spec(here / "run.json") == made
    return made


@pytest.mark.parametrize("option", TRAVELLING, ids=lambda option: option.names[-1])
def test_an_option_changes_its_field(option: Option, here: Path) -> None:
    name = TRAVELS_AS.get(option.dest, option.dest)
    assert name in FIELDS, f"{option.names[-1]} is in no field of RunSpec: the agents never see it"
    plain, given = (spec_of(here, *TOGETHER.get(option.dest, ()), *more) for more in ((), arguments(option)))
    if "--requeue" not in option.names:  # the default
        assert getattr(given, name) != getattr(plain, name)


def test_every_field_is_given_by_an_option_or_decided() -> None:
    given = {TRAVELS_AS.get(option.dest, option.dest) for option in TRAVELLING}
    assert FIELDS.keys() == given | DECIDED


def test_the_tables_above_name_what_there_is() -> None:
    dests = {option.dest for option in ALL_OPTIONS}
    assert {*TRAVELS_AS, *VALUES, *TOGETHER, *DERIVED} <= dests
    assert FIELDS.keys() >= DECIDED

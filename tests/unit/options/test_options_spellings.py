"""What people type who come from other launchers, and the hint that they get."""

from __future__ import annotations

import pytest

from hpc_elastic.cli.config import HELP, read_command_line
from hpc_elastic.errors import UsageError
from hpc_elastic.options.run_request import ALL_OPTIONS
from hpc_elastic.options.table import MEANT, Keys, nearest
from hpc_elastic.submission.executor import unknown

ENV = {"HPC_ELASTIC_SITE_CONFIG": "", "HPC_ELASTIC_USER_CONFIG": "", "HPC_ELASTIC_PROJECT_CONFIG": ""}
NAMES = {name[2:] for option in ALL_OPTIONS for name in option.names if name.startswith("--")}


def answer(*argv: str) -> str:
    """What `submit` says to it; the option's name where it is taken."""
    try:
        parsed = read_command_line([*argv, "train.py"], subcommand="submit", help_=HELP, env=ENV)
    except UsageError as error:
        return str(error)
    assert parsed is not None
    (source,) = parsed.sources.values()
    return source


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        # torchrun
        ("--nproc_per_node", "--nproc-per-node"),
        ("--nproc-per-nod", "unknown option --nproc-per-nod; did you mean --nproc-per-node?"),
        ("--nprocs", "did you mean --nproc-per-node (on each node)?"),
        ("--nproc", "did you mean --nproc-per-node (on each node)?"),
        ("--nnodes", "--nnodes"),
        ("--nnode", "did you mean --nodes?"),
        ("--node_rank", "--node-rank: not needed: Slurm says which node is which"),
        ("--rdzv_endpoint", "--rdzv-endpoint: not needed: nodes find each other"),
        ("--rdzv_timeout", "did you mean --rdzv-conf (timeout=SECONDS)?"),
        ("--max_restart", "did you mean --max-restarts?"),
        ("--master_port", "--master-port"),
        # accelerate
        ("--num_processes", "did you mean --nproc-per-node (per node, not in total)?"),
        ("--num_machines", "did you mean --nodes?"),
        ("--machine_rank", "--machine-rank: not needed: Slurm says which node is which"),
        ("--main_process_ip", "did you mean --master-addr (only if"),
        ("--main_process_port", "did you mean --master-port (only for"),
        ("--multi_gpu", "--multi-gpu: not needed"),
        ("--mixed_precision", "--mixed-precision: not a launcher's option: set it in the script"),
        # DeepSpeed, Lightning
        ("--num-nodes", "did you mean --nodes?"),
        ("--num_gpus", "did you mean --gpus-per-node (on each node)?"),
        ("--include", "did you mean --nodelist?"),
        ("--devices", "did you mean --gpus-per-node (on each node)?"),
        ("--hostfile", "did you mean --nodelist?"),
        ("--max-nodes", "did you mean --nodes (a range, as in --nodes 2-4)?"),
        # sbatch
        ("--gpus", "--gpus"),
        ("--ntasks-per-node", "--ntasks-per-node: tasks are started by srun, one agent per node; use --nproc-per-node"),
        ("--ntasks", "--ntasks: tasks are started by srun, one agent per node; use --nproc-per-node"),
        ("-n", "-n: tasks are started by srun, one agent per node; use --nproc-per-node"),
        ("--gpus-per-task", "--gpus-per-task: one agent per node has all its GPUs; use --gpus-per-node"),
        ("--wrap", "--wrap: the batch script is generated"),
        ("--time-limit", "did you mean --time?"),
        ("--walltime", "did you mean --time?"),
        ("--mail", "did you mean --mail-user (with --mail-type)?"),
        ("--email", "did you mean --mail-user (with --mail-type)?"),
        ("--queue", "did you mean --partition?"),
        ("--name", "did you mean --job-name?"),
        ("--cpus", "did you mean --cpus-per-task (on each node)?"),
        ("--memory", "did you mean --mem (on each node)?"),
        ("--workdir", "did you mean --chdir?"),
        ("--mem-per-cpu", "--mem-per-cpu"),
        ("--licences", "did you mean --licenses?"),
        ("--open-mode", "--open-mode: every attempt appends to the job log"),
        ("--nodez", "did you mean --nodes?"),
        ("--quos", "did you mean --qos?"),
        (
            "--frobnicate",
            "unknown option --frobnicate; script arguments go after the script, sbatch's other options",
        ),
    ],
)
def test_the_command_lines_hint(typed: str, says: str) -> None:
    found = answer(typed, "1")
    assert found == says if says in (f"--{name}" for name in NAMES) else says in found


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ("--standalone", "--rdzv-backend", "c10d", "--nproc-per-node", "2", "--node_rank=0"),
            "--standalone, --rdzv-backend, --node-rank: not needed: nodes find each other through files in the run "
            "directory; Slurm says which node is which; leave them out",
        ),
        (("--run-path",), "--run-path: not needed: a script always runs as __main__; leave it out"),
        (
            ("--local-addr", "n1", "--frobnicate"),
            "--local-addr: not needed: the address of each node is detected; leave",
        ),
        (("--standalone", "mine.py", "--node-rank"), "--standalone: not needed"),
    ],
)
def test_torchruns_options_that_mean_nothing_here_are_refused_together(argv: tuple[str, ...], says: str) -> None:
    assert answer(*argv).startswith(says)


def test_the_table_holds_together() -> None:
    assert {option for option, _ in MEANT.values()} <= NAMES
    assert not NAMES & set(MEANT), "an option of ours needs no hint"


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("num_nodes", "nodes"),
        ("num-processes", "nproc-per-node"),
        ("time_limit", "time"),
        ("partitoin", "partition"),
        ("licences", "licenses"),
        ("frobnicate", None),
    ],
)
def test_so_it_is_in_files_and_for_the_executor(typed: str, key: str | None) -> None:
    assert Keys(ALL_OPTIONS).nearest(typed) == key
    found = str(unknown(typed.replace("-", "_")))
    assert f"did you mean {key.replace('-', '_')}?" in found if key else "goes into additional_parameters" in found


def test_only_what_is_known_is_meant() -> None:
    assert nearest("num-nodes", ["nodez"]) is None
    assert nearest("mail", ["mails"]) == "mails"

"""The fork server's decisions, and what is read in a script without running it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_elastic.agent.fork_server import MOST_STARTS, why_given_up
from hpc_elastic.agent.fork_server_process import folder_of, late_settings, scripts_of, top_level_imports
from hpc_elastic.agent.worker_environment import shared_environment
from hpc_elastic.errors import UsageError
from hpc_elastic.run.option_values import StartMethod, parse_modules, parse_start_method
from hpc_elastic.run.spec import Preload, preload_for
from tests.rigs.specs import make_spec

SPEC = make_spec()


@pytest.mark.parametrize(
    ("left_out", "starts", "reason"),
    [
        ({}, 0, ""),
        ({"mine": "it opens a socket"}, 1, ""),
        ({"torch._inductor": "it starts a process"}, 1, ""),
        ({"torch": "it starts a thread", "mine": "it opens a socket"}, 1, "nothing is left to preload: torch: it"),
        ({}, MOST_STARTS, f"{MOST_STARTS} fork servers in a row"),
    ],
)
def test_a_server_is_given_up_when_nothing_is_left_or_none_ever_works(
    left_out: dict[str, str], starts: int, reason: str
) -> None:
    preload = Preload(modules=("torch", "mine"), learned=("torch._inductor",), left_out=left_out)
    assert why_given_up(preload, starts=starts).startswith(reason)
    assert bool(why_given_up(preload, starts=starts)) is bool(reason)


def test_what_was_learned_is_there_for_the_next_attempt_and_for_auto_alone(tmp_path: Path) -> None:
    path = tmp_path / "preload.json"
    assert preload_for(("auto", "mine"), path) == Preload(modules=("torch", "mine"), is_auto=True)
    Preload(modules=("torch",), is_auto=True).with_learned(["torch.x"]).without("torch.y", "why").save(path)
    again = preload_for(("auto",), path)
    assert (again.learned, again.left_out, again.is_auto) == (("torch.x",), {"torch.y": "why"}, True)
    assert preload_for(("mine",), path) == Preload(modules=("mine",))
    path.write_text('{"version": 1, "modules"')
    assert preload_for(("auto",), path).learned == ()


def test_an_import_that_reads_a_ranks_own_wandb_run_or_gpu_is_noticed() -> None:
    spec = replace(SPEC, wandb=True, virtual_local_rank=True)
    _, rest = shared_environment({}, spec=spec, local_world_size=2, run_dir="/r", attempt=1, tag="t")
    assert {"WANDB_RUN_ID", "CUDA_VISIBLE_DEVICES"} <= rest


def test_the_environment_that_workers_share_has_nothing_of_one_rank_or_round() -> None:
    base = {"HOME": "/h", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "RANK": "5"}
    shared, rest = shared_environment(base, spec=SPEC, local_world_size=2, run_dir="/r", attempt=1, tag="t")
    assert {"RANK", "LOCAL_RANK", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"} <= rest
    assert {"TORCHELASTIC_ERROR_FILE", "SLURM_PROCID", "SLURM_NTASKS"} <= rest
    assert not rest & shared.keys()
    given = {"HPC_ELASTIC_TAG": "t", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2", "HOME": "/h"}
    assert {name: shared[name] for name in given} == given


def test_torchruns_start_methods_and_lists_of_modules_and_no_others() -> None:
    methods = [parse_start_method(text, "--start-method") for text in ("spawn", "fork", "forkserver")]
    assert methods == [StartMethod.SPAWN, StartMethod.SPAWN, StartMethod.FORKSERVER]
    with pytest.raises(UsageError, match="spawn, forkserver"):
        parse_start_method("thread", "--start-method")
    assert parse_modules("auto, mine.models,auto", "--preload") == ("auto", "mine.models")
    for text in ("", "a b", "mine/models.py", "mine."):
        with pytest.raises(UsageError, match="--preload"):
            parse_modules(text, "--preload")


SCRIPT = """
'''doc'''
import os, numpy.linalg
from os import environ
os.environ["TORCH_LOGS"] = "all"
os.environ.setdefault("OMP_NUM_THREADS", "4")
environ["MINE"] = "1"
if True:
    import inside
from torch import nn
os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"
from . import neighbour
"""


def test_top_level_imports_are_those_of_no_block_and_no_neighbour() -> None:
    assert top_level_imports(SCRIPT) == ["os", "numpy", "torch"]
    assert top_level_imports("import (") == []


def test_a_variable_that_was_read_before_the_script_sets_it_is_named_with_its_line() -> None:
    reads = {"TORCH_LOGS": "torch", "TORCH_SHOW_CPP_STACKTRACES": "torch"}
    found = late_settings(SCRIPT, imported=["torch"], reads=reads)
    assert [text.partition(",")[0] for text in found] == ["line 5 sets TORCH_LOGS", "line 6 sets OMP_NUM_THREADS"]
    assert "torch has read already" in found[0]
    assert late_settings(SCRIPT, imported=["numpy"], reads=reads) == []


@pytest.mark.parametrize(
    "text",
    [
        "os.environ.update({'A': '1', 'TORCH_LOGS': 'all'})",
        "os.environ.update(TORCH_LOGS='all')",
        "os.environ |= {'TORCH_LOGS': 'all'}",
        "os.environ.pop('TORCH_LOGS', None)",
        "del os.environ['TORCH_LOGS']",
        "os.putenv('TORCH_LOGS', 'all')",
        "x = os.environ['TORCH_LOGS'] = 'all'",
        "if 'A' not in os.environ:\n    os.environ['TORCH_LOGS'] = 'all'",
        "try:\n    os.environ['TORCH_LOGS'] = 'all'\nexcept KeyError: pass",
        "with open('x'):\n    for n in (1, 2):\n        os.environ.setdefault('TORCH_LOGS', 'all')",
    ],
)
def test_every_way_to_set_a_variable_at_the_top_of_a_script_is_seen(text: str) -> None:
    found = late_settings(f"import os\n{text}\nimport torch", imported=["torch"], reads={"TORCH_LOGS": "torch"})
    assert len(found) == 1
    assert "sets TORCH_LOGS, which torch has read already" in found[0]
    in_function = f"def f():\n    {text.splitlines()[0]}".replace(":\n    if", ": pass\n    if")
    assert late_settings(in_function, imported=["torch"], reads={"TORCH_LOGS": "torch"}) == []


@pytest.mark.parametrize(
    ("argv", "scripts", "folder"),
    [
        (["python", "-u", "sub/t.py", "-m"], ["/w/sub/t.py"], "/w/sub"),
        (["python", "-u", "-m", "pkg.t"], ["/w/pkg/t.py", "/w/pkg/t/__main__.py"], "/w"),
        (["python", "-u", "/abs/t.py"], ["/abs/t.py"], "/abs"),
    ],
)
def test_where_the_script_and_its_neighbours_are(argv: list[str], scripts: list[str], folder: str) -> None:
    assert (scripts_of(argv, "/w"), folder_of(argv, "/w")) == (scripts, folder)

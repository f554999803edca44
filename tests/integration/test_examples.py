"""The examples that ship: the same losses with and without an accident, and the report that the README shows."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpc_elastic.submission import ElasticExecutor, Script
from tests.rigs.training_scripts import (
    EPOCHS,
    EXAMPLES,
    ROOT,
    check_that_it_resumed,
    of_job,
    output_alone,
    run_alone,
    run_with_a_killed_rank,
)

DIGITS = EXAMPLES / "train_digits.py"
METHODS = pytest.mark.parametrize("start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
pytestmark = pytest.mark.torch
# Looked for and not imported: its threads would be pytest's, where other tests send signals to themselves.
needs_sklearn = pytest.mark.skipif(not find_spec("sklearn"), reason="needs scikit-learn")


def final_loss(output: str) -> float:
    (found,) = re.findall(
        rf"final: (?:epoch={EPOCHS}|steps=30) loss=([0-9.]+) (?:accuracy|starts)=[0-9.]+$", output, re.MULTILINE
    )
    return float(found)


@pytest.fixture(scope="module")
def undisturbed_loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    folder = tmp_path_factory.mktemp("undisturbed")
    return final_loss(output_alone("train_digits.py", folder / "digits", "--epochs", str(EPOCHS)))


@needs_sklearn
def test_a_notice_ends_it_after_an_epoch_and_the_next_attempt_resumes(tmp_path: Path, undisturbed_loss: float) -> None:
    """On all ranks after the same epoch, whichever it is."""
    command = [
        *(sys.executable, "-m", "hpc_elastic", "run", "--cluster", "local", "--nodes", "2", "--max-requeues", "1"),
        *("--runs-dir", str(tmp_path / "runs"), str(DIGITS), "--epochs", str(EPOCHS), "--epoch-delay", "3"),
        *("--checkpoint", str(tmp_path / "digits")),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        lines = []
        for line in run.stdout:
            lines.append(line)
            if "epoch 2/" in line:  # after the first one each rank has asked for the first time
                run.send_signal(signal.SIGUSR2)
        assert run.wait(timeout=180) == 0, lines
    output = "".join(lines)
    stopped = re.search(r"stopping after epoch (\d): the job is about to end", output)
    assert stopped, output
    epoch = stopped[1]
    (agreed,) = set(re.findall(r"saved in \d+ of \d+ s \(step (\d)\)", output))
    assert agreed <= epoch, "later where a busy machine's agents hear of the notice between two epochs"
    assert f"resuming after epoch {epoch} from {tmp_path / 'digits'}" in output
    assert output.count("final: ") == 1
    assert final_loss(output) == pytest.approx(undisturbed_loss, rel=1e-4)


@needs_sklearn
def test_the_same_script_submitted_by_a_program(tmp_path: Path, undisturbed_loss: float) -> None:
    """It is as unchanged as above. (What restarts it is the same; test_submission_local has a worker killed.)"""
    executor = ElasticExecutor(tmp_path / "jobs", cluster="local")
    executor.update_parameters(nodes=1, timeout_min=60)
    job = executor.submit(Script(DIGITS), "--epochs", EPOCHS, "--checkpoint", tmp_path / "digits")
    result = of_job(job)
    assert result.returncode == 0, result.stdout + result.stderr
    assert job.results() == [None]
    assert final_loss(result.stdout) == pytest.approx(undisturbed_loss, rel=1e-4)


@METHODS
def test_sharded_checkpoints_make_a_killed_rank_cost_a_restart_and_no_accuracy(
    tmp_path: Path, start_method: str
) -> None:
    undisturbed = run_alone("train_fsdp.py", tmp_path / "alone")
    result = run_with_a_killed_rank("train_fsdp.py", tmp_path, moved=".metadata", start_method=start_method)
    check_that_it_resumed(result, undisturbed)


def starts(output: str) -> set[tuple[int, int, int, int]]:
    """Iteration, rank, world size and pid of each start."""
    pattern = r"start (\d+): rank (\d+) of (\d+), process (\d+)"
    return {(int(i), int(rank), int(size), int(pid)) for i, rank, size, pid in re.findall(pattern, output)}


@METHODS
def test_a_killed_rank_is_replaced_and_the_loss_is_that_of_an_undisturbed_run(
    tmp_path: Path, start_method: str
) -> None:
    command = [sys.executable, "-m", "hpc_elastic", "run", "--cluster", "local", "--nodes", "2"]
    command += ["--nproc-per-node", "2", "--restart-policy", "in-process", "--runs-dir", str(tmp_path / "runs")]
    command += [
        "--start-method",
        start_method,
        str(EXAMPLES / "train_in_process.py"),
        "--checkpoint",
        str(tmp_path / "ring"),
    ]
    command += ["--checkpoint", str(tmp_path / "ring"), "--fail-rank", "2", "--fail-step", "12", "--fail-how", "kill"]
    result = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    alone = output_alone("train_in_process.py", tmp_path / "alone")
    assert final_loss(result.stdout) == pytest.approx(final_loss(alone), rel=1e-4)
    found = starts(result.stdout)
    before = {rank: pid for iteration, rank, size, pid in found if iteration == 0}
    last = max(iteration for iteration, *_ in found)
    after = {rank: pid for iteration, rank, size, pid in found if iteration == last}
    assert sorted(before) == sorted(after) == [0, 1, 2, 3]
    assert {rank for rank in before if before[rank] != after[rank]} == {2}, "the others keep their processes"
    assert "fresh process in place of rank 2" in result.stdout, "in the report"

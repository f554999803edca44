"""The example that ships: the same losses with and without an accident, and the report that the README shows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpc_elastic.submission import ElasticExecutor, Script
from tests.rigs.inprocess_ranks import free_ports
from tests.rigs.training_scripts import of_job

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "examples" / "train_digits.py"
EPOCHS = 4
pytestmark = [
    pytest.mark.torch,
    # Looked for and not imported: their threads would be pytest's, where other tests send signals to themselves.
    pytest.mark.skipif(not (find_spec("torch") and find_spec("sklearn")), reason="needs torch and scikit-learn"),
]


def final_loss(output: str) -> float:
    (found,) = re.findall(rf"final: epoch={EPOCHS} loss=([0-9.]+) accuracy=[0-9.]+$", output, re.MULTILINE)
    return float(found)


@pytest.fixture(scope="module")
def undisturbed_loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    folder = tmp_path_factory.mktemp("undisturbed")
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports())}
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--epochs", str(EPOCHS), "--checkpoint", str(folder / "digits")],
        env=env, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return final_loss(result.stdout)


def test_a_notice_ends_it_after_an_epoch_and_the_next_attempt_resumes(tmp_path: Path, undisturbed_loss: float) -> None:
    """On all ranks after the same epoch, whichever it is."""
    command = [
        *(sys.executable, "-m", "hpc_elastic", "run", "--cluster", "local", "--nodes", "2", "--max-requeues", "1"),
        *("--runs-dir", str(tmp_path / "runs"), str(SCRIPT), "--epochs", str(EPOCHS), "--epoch-delay", "3"),
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


def test_the_same_script_submitted_by_a_program(tmp_path: Path, undisturbed_loss: float) -> None:
    """It is as unchanged as above. (What restarts it is the same; test_submission_local has a worker killed.)"""
    executor = ElasticExecutor(tmp_path / "jobs", cluster="local")
    executor.update_parameters(nodes=1, timeout_min=60)
    job = executor.submit(Script(SCRIPT), "--epochs", EPOCHS, "--checkpoint", tmp_path / "digits")
    result = of_job(job)
    assert result.returncode == 0, result.stdout + result.stderr
    assert job.results() == [None]
    assert final_loss(result.stdout) == pytest.approx(undisturbed_loss, rel=1e-4)

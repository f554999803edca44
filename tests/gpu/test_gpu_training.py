"""The main job on a GPU: trained, a rank killed, resumed, to the losses of a run that nothing disturbed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_elastic.run.paths import ExitCode
from tests.rigs.gpu import RUN_SECONDS, GpuRun
from tests.rigs.torch_ranks import ALL_REDUCE
from tests.rigs.training_scripts import SYNTHETIC, check_that_it_resumed, run_alone, run_with_a_killed_rank

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_training_that_is_killed_resumes_to_the_same_losses(
    tmp_path: Path, seen: Callable[[str, str], None], request: pytest.FixtureRequest, backend: str
) -> None:
    """Two nodes with a worker each on one GPU; with one worker alone on it where nothing disturbs."""
    way = request.getfixturevalue("way") if backend == "nccl" else "as it is"
    arguments = ("--device", "cuda", "--backend", backend)
    undisturbed = run_alone(SYNTHETIC, tmp_path / "alone", arguments=arguments)
    began = time.monotonic()
    result = run_with_a_killed_rank(SYNTHETIC, tmp_path, moved="checkpoint", arguments=(*arguments, "--way", way))
    check_that_it_resumed(result, undisturbed)
    assert "final: epoch=4 ranks=2 device=cuda" in result.stdout, result.stdout + result.stderr
    seen(f"training on CUDA, {backend}, a rank killed", f"same losses, {time.monotonic() - began:.0f} s in all")


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_killed_peer_in_a_collective_is_named_and_the_group_made_anew(
    tmp_path: Path,
    seen: Callable[[str, str], None],
    keep: Callable[[str, str | Path], None],
    request: pytest.FixtureRequest,
    backend: str,
) -> None:
    way = request.getfixturevalue("way") if backend == "nccl" else "as it is"
    with GpuRun(tmp_path, ALL_REDUCE, nodes=2, arguments=(backend, "cuda", way)) as run:
        for round_index in range(2):
            run.until(
                lambda index=round_index: len(run.moments("here", round_index=index)) == 2,  # type: ignore[misc]
                f"group of round {round_index}",
                within=RUN_SECONDS,
            )
            if round_index == 0:
                run.kill_worker(1, round_index=0)
                killed = time.monotonic()
        again = time.monotonic() - killed
        run.say("end")
        assert run.finish(within=RUN_SECONDS) == ExitCode.OK, run.explain()
        cause = run.cause()
        assert (cause["global_rank"], cause["failure_class"]) == (1, "root"), run.explain()
        assert "SIGKILL not sent by hpc-elastic" in cause["reason"], run.explain()
        assert {value["total"] for value in run.moments("here")} == {3.0}
        keep(f"killed-peer-{backend}-rank0.txt", run.rank(0).stderr)
        seen(f"a peer killed in {backend}'s all-reduce", f"named; the next group's first sum {again:.1f} s later")

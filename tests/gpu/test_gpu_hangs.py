"""A kernel that never ends; and the GPU's memory, which the next worker needs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_elastic.agent.health import gpus_from_json
from hpc_elastic.base.host_facts import module_command
from hpc_elastic.run.paths import ExitCode
from hpc_elastic.workers.tree import TAG_VARIABLE
from tests.rigs.gpu import RUN_SECONDS, GpuRun, Machine, memory_readings, memory_watched

pytestmark = pytest.mark.gpu

_SLACK = 1 << 30
"""Bytes: two CUDA contexts, which are no part of what is measured."""
_HOLD = """
import torch, hpc_elastic
from tests.rigs.torch_ranks import queue_what_never_ends

free, _ = torch.cuda.mem_get_info()
if ROUND:
    tell("again", free=free)
else:
    held = torch.empty(free // 2, dtype=torch.uint8, device="cuda").fill_(1)
    torch.cuda.synchronize()
    tell("here", free=free, monotonic=time.monotonic())
"""


def _check_given_back(run: GpuRun, seen: Callable[[str, str], None], how: str) -> None:
    (before,), (after,) = run.moments("here"), run.moments("again")
    short = before["free"] - after["free"]
    seen(f"free memory at the restart after {how}", f"{short / 2**20:.0f} MiB less than before, half of it was in use")
    assert short < _SLACK, run.explain()


def test_a_kernel_that_never_ends_is_found_with_stacks_and_its_memory_is_given_back(
    tmp_path: Path, seen: Callable[[str, str], None], keep: Callable[[str, str | Path], None]
) -> None:
    script = f"""{_HOLD}
def wait_for_the_gpu():
    torch.cuda.synchronize()

if not ROUND:
    hpc_elastic.heartbeat(step=7)
    queue_what_never_ends()
    wait_for_the_gpu()
"""
    began = time.monotonic()
    with GpuRun(tmp_path, script, nodes=1, options=["--section-timeouts", "step:5"]) as run:
        assert run.finish(within=RUN_SECONDS) == ExitCode.OK, run.explain()
        failure = run.report()["verdict"]["failure"]
        keep("stacks-kernel-that-never-ends.txt", run.rank(0).stacks)
        assert (failure["failure_class"], failure["last_step"]) == ("hang", 7), run.explain()
        assert "in wait_for_the_gpu" in failure["traceback"], f"{failure['traceback']}\n{run.explain()}"
        _check_given_back(run, seen, "a kernel that never ended")
    seen("a kernel that never ends", f"a hang, with its stack; all in {time.monotonic() - began:.0f} s")


def test_memory_is_given_back_before_the_restart_after_a_kill(
    tmp_path: Path, machine: Machine, seen: Callable[[str, str], None]
) -> None:
    with memory_watched(machine, tmp_path) as watched, GpuRun(tmp_path, _HOLD_AND_WAIT, nodes=1) as run:
        run.until(lambda: run.moments("here"), "worker that holds memory", within=RUN_SECONDS)
        killed = time.monotonic()
        run.kill_worker(0, round_index=0)
        run.until(lambda: run.moments("again"), "worker of the next round", within=RUN_SECONDS)
        began = run.events("round_final")[-1]
        assert run.finish(within=RUN_SECONDS) == ExitCode.OK, run.explain()
        assert began["round"] == 1, run.explain()
        _check_given_back(run, seen, "SIGKILL")
        readings = memory_readings(watched)
    held = [used for at, used in readings if at <= killed]
    if not held:
        pytest.skip("NVML does not say how much memory is in use here")
    low = held[-1] - run.moments("here")[0]["free"] // 4
    freed = next((at - killed for at, used in readings if at > killed and used < low), None)
    assert freed is not None, f"never below {low}: {readings[-5:]}"
    seen("GPU memory given back after SIGKILL", f"{freed:.2f} s (NVML)")


def test_memory_that_an_ended_process_held_is_waited_for(
    tmp_path: Path, machine: Machine, seen: Callable[[str, str], None]
) -> None:
    """By the program that the health check runs, with a process in the place of a worker."""
    if not machine.uuid:
        pytest.skip(f"torch {machine.torch} does not say the GPU's UUID")
    env = {**os.environ, TAG_VARIABLE: "run:gpu-test-0:agent"}

    def held(*arguments: str, tag: str = env[TAG_VARIABLE]) -> tuple[int, float]:
        argv = [*module_command("hpc_elastic.agent.health", "print_gpus"), *arguments]
        done = subprocess.run(argv, env={**env, TAG_VARIABLE: tag}, capture_output=True, text=True, timeout=120)
        facts = gpus_from_json(done.stdout)
        (device,) = [device for device in facts.devices if device.uuid == machine.uuid]
        if device.held is None:
            pytest.skip("NVML does not say how much memory is in use here")
        return device.held, facts.waited

    before, _ = held()
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER], env=env, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        during, _ = held()
        others, _ = held(tag="run:gpu-test-1:agent")
    finally:
        holder.kill()
        holder.wait()
    after, waited = held("50", f"{machine.uuid}={before}")
    shown = {"before": before, "of a worker": during, "of others": others, "after": after}
    figures = ", ".join(f"{name} {value / 2**20:.0f} MiB" for name, value in shown.items())
    seen("memory that a process of 4 GiB holds", f"{figures}; waited {waited:.2f} s after SIGKILL")
    assert during - before >= 4 << 30, figures
    assert after - before < _SLACK, figures
    assert waited < 50, figures


_HOLDER = """
import torch, time
held = torch.ones(4 << 30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
time.sleep(600)
"""
_HOLD_AND_WAIT = f"{_HOLD}\nif not ROUND:\n    wait_for('never')\n"

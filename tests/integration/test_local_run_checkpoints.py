"""``--checkpoint-dir``: training that is disturbed ends as if it had not been, and little is done again."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.rigs import lockstep
from tests.rigs.checkpoint_trainer import trainer
from tests.rigs.local_run import LocalRun
from tests.rigs.small_disk import fill_disk, small_disk


def run_with(folder: Path, *options: str, nodes: int = 2, **changes: Any) -> LocalRun:
    return LocalRun(folder, trainer(**changes), nodes=nodes, nproc=2, options=["--checkpoint-dir", "saved", *options])


def begins(run: LocalRun) -> list[tuple[int, str]]:
    """Step and place that ranks continued from, in the order of the job log."""
    return [(int(step), place) for step, place in re.findall(r"begins at step (\d+) from ([a-z ]+)", run.log())]


def kill_a_worker(run: LocalRun, round_index: int, rank: int = 3) -> None:
    started = run.until(
        lambda: [
            event
            for event in run.events("workers_started")
            if event["round"] == round_index and len(event["pids"]) == 2
        ],
        "workers",
    )
    found = next(event for event in started if event["node"] == rank // 2)
    os.kill(found["pids"][rank % 2], signal.SIGKILL)


def check_result(run: LocalRun, folder: Path) -> int:
    """The state is what as many steps lead to undisturbed, and the last step is on the shared filesystem."""
    run.finish()
    final = re.findall(r"final: step=(\d+) state=(\d+)", run.log())
    assert final, run.log_tail()
    steps = int(final[0][0])
    assert {int(state) for _, state in final} == {lockstep.expected(steps)}
    assert (folder / "saved" / f"step-{steps}" / "hpc-elastic-index.json").exists(), run.log_tail()
    assert not [name for name in os.listdir(folder / "saved") if name.startswith(".")]
    return steps


@pytest.mark.parametrize("each", [True, False], ids=["each-rank", "rank-0"])
def test_a_killed_worker_costs_the_steps_since_the_last_save(tmp_path: Path, each: bool) -> None:
    with run_with(tmp_path, each=each) as run:
        run.until(lambda: run.log().count("saved 10 in") == 4, "step 10 on all ranks")
        kill_a_worker(run, 0)
        run.until(lambda: len(begins(run)) == 8, "second round")
        (tmp_path / "end").touch()
        steps = check_result(run, tmp_path)
        again = {step for step, _ in begins(run)[4:]}
        assert len(again) == 1
        assert again.pop() >= 10
        chosen = run.events("checkpoint_chosen")
        assert chosen[0].get("step") is None
        last = run.report()["attempts"][0]["checkpoint"]
        assert last["committed"]["step"] == steps
        assert last["not_committed"] is None
        assert f"checkpoint   : step {steps} is committed" in run.log()


def test_what_is_on_the_nodes_alone_is_read_there_and_flushed_at_the_end(tmp_path: Path) -> None:
    with run_with(tmp_path, "--checkpoint-bandwidth", "64K", pad=400_000) as run:
        run.until(lambda: run.log().count("saved 20 in") == 4, "step 20 on all ranks")
        assert not os.path.exists(tmp_path / "saved" / "step-20"), "a copy takes 12 s"
        kill_a_worker(run, 0)
        run.until(lambda: len(begins(run)) == 8, "second round")
        assert {place for _, place in begins(run)[4:]} == {"its node"}
        assert begins(run)[4][0] >= 20
        (tmp_path / "end").touch()
        check_result(run, tmp_path)
        assert run.events("checkpoint_committed")[-1]["at_end"]
        assert "(flushed at the end)" in run.log()


def test_a_killed_agent_takes_its_part_along(tmp_path: Path) -> None:
    with run_with(tmp_path, "--checkpoint-keep", "1") as run:
        run.until(lambda: run.events("checkpoint_committed"), "a committed step")
        run.kill_agent_in_a_round(1)
        run.until(lambda: len(begins(run)) >= 8, "second round")
        committed = {event["step"] for event in run.events("checkpoint_committed")}
        assert {step for step, _ in begins(run)[4:8]} <= committed
        (tmp_path / "end").touch()
        check_result(run, tmp_path)
        assert len([name for name in os.listdir(tmp_path / "saved") if name.startswith("step-")]) <= 2


def test_a_lost_nodes_part_is_on_its_neighbour(tmp_path: Path) -> None:
    options = ["--checkpoint-bandwidth", "64K", "--checkpoint-replicas", "1"]
    with run_with(tmp_path, *options, nodes=3, pad=400_000, step_seconds=0.2) as run:
        run.until(lambda: "saved 20 in" in run.log(), "step 20")
        assert not run.events("checkpoint_committed"), "a copy takes 12 s"
        run.kill_agent_in_a_round(1)
        run.until(lambda: len(begins(run)) >= 12, "second round")
        assert {step for step, _ in begins(run)[6:12]} <= {10, 15, 20, 25}, "its neighbour had it"
        (tmp_path / "end").touch()
        check_result(run, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", ["0", "1"])
def test_many_faults_end_as_none_would(tmp_path: Path, replicas: str) -> None:
    rng = random.Random(7)
    options = ["--checkpoint-replicas", replicas, "--max-restarts", "100", "--checkpoint-bandwidth", "1M"]
    with run_with(tmp_path, *options, nodes=3, pad=200_000) as run:
        for number in range(12):
            run.until(lambda: len(run.events("checkpoint_chosen")) > number, "a round")  # noqa: B023
            chosen = run.events("checkpoint_chosen")[number]
            steps = (chosen.get("step") or 0) + rng.randint(3, 25)
            run.until(lambda: f"step {steps} at" in run.log(), f"step {steps}")  # noqa: B023
            if rng.random() < 0.6:
                kill_a_worker(run, chosen["round"], rng.randrange(6))
            else:
                run.kill_agent_in_a_round(rng.randrange(3))
        run.until(lambda: len(run.events("checkpoint_chosen")) > 12, "the last round")
        (tmp_path / "end").touch()
        check_result(run, tmp_path)


def test_a_notice_has_the_last_step_committed(tmp_path: Path) -> None:
    with run_with(tmp_path, "--checkpoint-bandwidth", "64K", every=1000, pad=100_000) as run:
        run.until(lambda: "step 5 at" in run.log(), "step 5")
        run.signal(signal.SIGUSR2)
        run.finish()
        saved = {int(step) for step in re.findall(r"saved (\d+) in", run.log())}
        assert len(saved) == 1
        assert [event["step"] for event in run.events("checkpoint_committed")] == [*saved]


def test_a_full_disk_keeps_the_last_complete_one(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["--checkpoint-dir", str(disk / "saved")]
    with small_disk(disk, "16m"), LocalRun(tmp_path, trainer(pad=300_000), nodes=2, nproc=2, options=options) as run:
        run.until(lambda: run.events("checkpoint_committed"), "a committed step")
        fill_disk(disk / "other")
        run.until(lambda: run.events("checkpoint_not_committed"), "a full disk")
        lacking = run.events("checkpoint_not_committed")[0]
        assert re.search("No space left|could not copy", lacking["reason"])
        assert (disk / "saved" / f"step-{lacking['last_step']}" / "hpc-elastic-index.json").exists()
        kill_a_worker(run, 0)
        run.until(lambda: len(begins(run)) == 8, "second round")
        (disk / "other").unlink()
        (tmp_path / "end").touch()
        run.finish()
        steps, state = re.findall(r"final: step=(\d+) state=(\d+)", run.log())[0]
        assert int(state) == lockstep.expected(int(steps))
        assert (disk / "saved" / f"step-{steps}").exists()


def test_a_node_without_room_refuses_to_start(tmp_path: Path) -> None:
    with run_with(tmp_path, "--checkpoint-local", "/dev/shm:900T") as run:
        assert run.finish() != 0
        assert re.search(r"--checkpoint-local /dev/shm:900.0 TiB: only [\d.]+ [GM]iB are free", run.log()), run.log()


_BEFORE = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def train(step):
    optimizer.zero_grad()
    model(torch.full((4, 8), float(step % 7))).pow(2).mean().backward()
    optimizer.step()
    if step == 25 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), 9)
"""
_AFTER = """
print(f"rank {rank} begins at {start} in round {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
print(f"final: {sum(p.double().sum().item() for p in model.parameters()):.12f}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def program_of_the_page(block: int) -> str:
    text = (Path(__file__).parents[2] / "docs/how-to/checkpoints.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return "from hpc_elastic import checkpoint_dir, latest_checkpoint\n" + str(blocks[block])


@pytest.mark.torch
@pytest.mark.parametrize("block", [pytest.param(0, id="torch.save", marks=pytest.mark.slow), pytest.param(1, id="dcp")])
def test_the_programs_of_the_page_resume(tmp_path: Path, block: int) -> None:
    """An unmodified DDP script, with the page's lines in it."""
    program = program_of_the_page(block)
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    options = ["--checkpoint-dir", str(tmp_path / "saved")]
    with LocalRun(tmp_path, _BEFORE + program + _AFTER, nodes=2, nproc=1, options=options, environ=cache) as run:
        assert run.finish(within=200) == 0, run.log_tail()
    assert re.search(r"begins at [1-9]\d* in round 1", run.log()), run.log_tail()
    assert len(set(re.findall(r"final: (\S+)", run.log()))) == 1
    assert run.events("checkpoint_committed")


_SHARDED = """
import os, time, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
rank, round_index = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def show(step):
    values = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()]).double()
    print(f"after {step}: {(values * torch.arange(1, len(values) + 1)).sum().item().hex()}", flush=True)

def train(step):
    if step == start + 1:
        place = "nothing" if not start else "its node" if "/hpc-elastic-checkpoints." in str(folder) else "shared"
        print(f"rank {rank} begins at step {start} from {place}", flush=True)
        show(start)
    optimizer.zero_grad()
    model(torch.full((4, 8), float(step % 7 + rank))).pow(2).mean().backward()
    optimizer.step()
    show(step)
    time.sleep(0.1)
    if step == 25 and rank == 3 and round_index == "0":
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.torch
def test_shards_are_resumed_after_a_killed_worker_and_a_lost_node(tmp_path: Path) -> None:
    """The page's lines for distributed checkpoints under `fully_shard`: each rank writes its shards."""
    program = (
        _SHARDED + program_of_the_page(1) + _AFTER.partition('print(f"final')[0] + "dist.destroy_process_group()\n"
    )
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    options = ["--checkpoint-dir", str(tmp_path / "saved")]
    with LocalRun(tmp_path, program, nodes=2, nproc=2, options=options, environ=cache) as run:
        run.until(lambda: len(begins(run)) == 8, "second round", within=200)
        killed_worker = begins(run)[4:]
        run.until(lambda: f"after {killed_worker[0][0] + 15}:" in run.log().partition("begins at step 20")[2], "steps")
        run.kill_agent_in_a_round(1)
        run.until(lambda: len(begins(run)) == 12, "third round", within=200)
        assert run.finish(within=200) == 0, run.log_tail()
    lost_node = begins(run)[8:]
    assert set(killed_worker) == {(20, "its node")}
    assert sorted(place for _, place in lost_node) == ["its node", "its node", "shared", "shared"]
    assert min(step for step, _ in lost_node) >= 30
    seen: dict[int, set[str]] = {}
    for step, values in re.findall(r"after (\d+): (\S+)", run.log()):
        seen.setdefault(int(step), set()).add(values)
    assert sorted(seen) == list(range(101))
    assert {step: values for step, values in seen.items() if len(values) > 1} == {}, "all have the same parameters"

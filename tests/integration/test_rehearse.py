"""``hpc-elastic rehearse`` on real runs: scripts that resume wrongly are found guilty of it, a right one is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.rehearsal.injector import FileNames, Injector
from hpc_elastic.workers import tree
from tests.rigs.local_run import ROOT
from tests.rigs.processes import bare_environ
from tests.rigs.small_disk import small_disk

TRAIN = '''
"""Least squares in pure Python, with momentum, a schedule and shuffled epochs; each rank has a part of its own."""
import json, os, random, sys, time
import hpc_elastic

FLAW, STEPS, EVERY, BATCHES = sys.argv[1], int(sys.argv[2]), 5, 7
RANK = int(os.environ["RANK"])
PATH = f"part-{RANK}.json"
LATEST = f"latest-{RANK}"


def write(path, text):  # as long as a checkpoint of some megabytes takes
    with open(path, "w") as file:
        file.write(text[:20])
        file.flush()
        time.sleep(0.01)
        file.write(text[20:])


def replace(path, text):
    write(f"{path}.new", text)
    os.replace(f"{path}.new", path)


def save(state):
    text = json.dumps({**state, "pad": "x" * 1000})
    if FLAW == "in-place":
        write(PATH, text)
    elif FLAW == "too-early":  # the pointer says that it is there before it is
        replace(LATEST, f"part-{RANK}-{state['step']}.json")
        write(f"part-{RANK}-{state['step']}.json", text)
    else:
        replace(PATH, text)


def load():
    path = PATH
    if FLAW == "too-early":
        if not os.path.exists(LATEST):
            return None
        path = open(LATEST).read()
    if FLAW == "none" or not os.path.exists(path):
        return None
    found = json.load(open(path))
    del found["pad"]
    return found


def order(epoch):
    found = list(range(BATCHES))
    random.Random(epoch).shuffle(found)
    return found


state = {"weight": 5.0, "momentum": 0.0, "step": 0, "schedule": 0, "epoch": 0, "place": 0}
found = load()
if found is not None:
    if FLAW == "rank-0" and RANK != 0:  # the rest keep what they began with
        found = {**found, "weight": 5.0, "momentum": 0.0}
    state = found
    if FLAW == "optimizer":
        state["momentum"] = 0.0
    if FLAW == "schedule":
        state["schedule"] = 0
    if FLAW == "sampler":
        state["epoch"] = state["place"] = 0
while state["step"] < STEPS:
    target = 1 + order(state["epoch"])[state["place"]] + 0.1 * RANK
    loss = (state["weight"] - target) ** 2 / 10
    gradient = state["weight"] - target
    state["momentum"] = 0.9 * state["momentum"] + gradient / 5
    state["weight"] -= 0.1 * 0.98 ** state["schedule"] * state["momentum"]
    state["step"], state["schedule"], state["place"] = state["step"] + 1, state["schedule"] + 1, state["place"] + 1
    if state["place"] == BATCHES:
        state["epoch"], state["place"] = state["epoch"] + 1, 0
    time.sleep(0.05)
    if FLAW != "tenth":
        hpc_elastic.heartbeat(state["step"], loss=loss)
    elif state["step"] % 10 == 0:
        print(f"step {state['step']} loss={loss}", flush=True)
    is_due = FLAW != "notice" and hpc_elastic.should_checkpoint(state["step"])
    if is_due or state["step"] % EVERY == 0:
        save(state)
    if is_due:
        sys.exit(0)
'''


def rehearse(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run it. Returns its exit code, and what it prints with ``--json``."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "hpc_elastic", "rehearse", "--json", *arguments],
        cwd=folder,
        env={**bare_environ(), "HOME": str(home), "XDG_STATE_HOME": str(home), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.stdout.startswith("{"), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def rehearse_training(folder: Path, flaw: str, faults: str, *, steps: int = 40) -> tuple[int, dict[str, Any]]:
    (folder / "train.py").write_text(TRAIN)
    return rehearse(folder, "--nproc-per-node", "2", "--faults", faults, "train.py", flaw, str(steps))


@pytest.mark.parametrize(
    ("flaw", "faults", "guilt"),
    [
        pytest.param("optimizer", "kill-worker", "losses_part", marks=pytest.mark.slow),
        pytest.param("schedule", "kill-worker", "losses_part", marks=pytest.mark.slow),
        pytest.param("sampler", "kill-worker", "losses_part", marks=pytest.mark.slow),
        ("rank-0", "kill-worker", "losses_part"),
        ("in-place", "kill-saving", "did_not_go_on"),
        pytest.param("too-early", "kill-saving", "did_not_go_on", marks=pytest.mark.slow),
        ("none", "kill-worker,notice", "no_checkpoint"),
    ],
)
def test_a_script_that_resumes_wrongly_in_one_detail_is_found_guilty_of_it(
    flaw: str, faults: str, guilt: str, tmp_path: Path
) -> None:
    # A second fault needs steps after the first: the script would be at its end before it.
    code, found = rehearse_training(tmp_path, flaw, faults, steps=160 if "," in faults else 40)
    assert code == 1, found
    assert not found["holds"]
    assert guilt in {one["of"] for one in found["guilty"]}, found["guilty"]
    page = next(tmp_path.glob("runs/rehearsal-*/rehearsal.html")).read_text()
    assert f"GUILTY: {found['guilty'][0]['text']}" in unescape(page)
    assert "<table>" in page


def test_a_right_script_holds_through_every_fault_that_can_be_done_here(tmp_path: Path) -> None:
    code, found = rehearse_training(tmp_path, "right", "all", steps=160)
    assert code == 0, found["guilty"]
    assert found["holds"]
    assert (found["guilty"], found["remarks"], found["steps"]) == ([], [], 160)
    faults = {one["fault"]: one for one in found["faults"]}
    assert set(faults) == {"kill-worker", "kill-saving", "exception", "notice"}
    assert {name for name, one in faults.items() if one["used_notice"]} == {"notice"}
    assert "while part-" in faults["kill-saving"]["hit"]
    for one in found["faults"]:
        assert one["resumed"] is not None, one
        assert one["seconds"] is not None, one
    assert any("two nodes" in text for text in found["not_done"]), "there is one node"
    page = next(tmp_path.glob("runs/rehearsal-*/rehearsal.html")).read_text()
    assert "holds: 4 faults; not tried: kill-node" in page
    assert found["losses"]["compared"] > 300
    assert found["losses"]["largest_difference"] == 0.0


def test_a_notice_that_is_not_used_is_a_remark_where_steps_were_lost(tmp_path: Path) -> None:
    code, found = rehearse_training(tmp_path, "notice", "notice", steps=200)
    assert (code, found["guilty"]) == (0, [])
    (one,) = found["faults"]
    assert not one["used_notice"] or one["done_again"] == 0, "a checkpoint was complete just then"
    assert bool(found["remarks"]) == (one["done_again"] > 0)


def test_of_a_script_that_prints_each_tenth_step_all_steps_are_counted(tmp_path: Path) -> None:
    code, found = rehearse_training(tmp_path, "tenth", "kill-worker,exception", steps=100)
    assert (code, found["guilty"], found["steps"]) == (0, [], 100)
    assert all(one["done_again"] % 10 == 0 for one in found["faults"]), found["faults"]


def test_it_says_how_long_it_takes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "hpc_elastic", "rehearse", "--faults", "kill-worker", "train.py", "right", "40"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"40 steps in \d+ s\n.*with 1 fault: about \d+ s\n", done.stderr)
    assert re.search(r"trains again after \S+ s; about \d+ s to go\n", done.stderr)


SAVER = """
import os, time
while True:
    time.sleep(0.4)
    with open("latest.new", "w") as file:
        file.write("part")
        file.flush()
        time.sleep(0.003)
    os.replace("latest.new", "latest")
    with open("part", "w") as file:
        file.write("x" * 1000)
        file.flush()
        time.sleep(0.003)
"""


def test_a_checkpoint_is_caught_that_is_written_at_once_after_a_small_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it takes longer to look for the workers than the second file is open."""
    look = tree.own_processes_where
    monkeypatch.setattr(tree, "own_processes_where", lambda matches: (time.sleep(0.05), look(matches))[1])
    tag = {"HPC_ELASTIC_TAG": "run:node:agent"}
    names = FileNames(sizes={"latest": 4, "part": 1000}, replaced={"latest", "part"}, seconds=10.0)
    with subprocess.Popen([sys.executable, "-c", SAVER], cwd=tmp_path, env={**os.environ, **tag}) as saver:
        try:
            while not (tmp_path / "part").exists():
                time.sleep(0.01)
            assert Injector("run", [tmp_path]).kill_in_save(names, 1.0)[1] == "part"
        finally:
            saver.kill()


def test_where_a_named_fault_is_not_done_no_verdict_is_certain(tmp_path: Path) -> None:
    code, found = rehearse_training(tmp_path, "right", "kill-worker,kill-node")
    assert (code, found["holds"], found["guilty"]) == (2, False, [])
    assert [one["fault"] for one in found["faults"]] == ["kill-worker"]
    assert found["not_done"] == ["kill-node: it needs two nodes or more (--nodes 2)"]
    page = next(tmp_path.glob("runs/rehearsal-*/rehearsal.html")).read_text()
    assert "not certain: 1 fault; not tried: kill-node" in page


@pytest.mark.slow
def test_a_save_that_no_run_of_three_could_catch_is_named_in_the_verdict(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # Each save only changes a name: no file is open while one looks.
    script = (
        f"import os, tempfile, time\nmade = tempfile.mkdtemp(dir={str(tmp_path_factory.mktemp('made'))!r})\n"
        "for step in range(1, 21):\n    open(f'{made}/{step}', 'w').write('x' * 1000)\n    time.sleep(0.05)\n"
        "    print(f'step {step} loss=1.0')\n    os.replace(f'{made}/{step}', 'part')\n"
    )
    (tmp_path / "train.py").write_text(script)
    code, found = rehearse(tmp_path, "--faults", "kill-saving", "train.py")
    assert (code, found["guilty"], found["faults"]) == (2, [], [])
    (text,) = found["not_done"]
    assert text.startswith("kill-saving: no save was caught while a file was open: let it do more steps"), text
    assert len(list(tmp_path.glob("runs/rehearsal-*/disturbed-*"))) == 3


@pytest.mark.slow
def test_a_disk_of_runs_that_is_full_for_a_while_is_survived(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    with small_disk(small, "64m"):
        (tmp_path / "train.py").write_text(TRAIN)
        options = ("--nproc-per-node", "2", "--runs-dir", str(small), "--faults", "disk-full")
        code, found = rehearse(tmp_path, *options, "train.py", "right", "200")
    assert (code, found["guilty"]) == (0, [])
    assert [one["fault"] for one in found["faults"]] == ["disk-full"]


def test_what_cannot_be_rehearsed_is_misuse_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(script: str, *options: str) -> str:
        (tmp_path / "train.py").write_text(script)
        done = subprocess.run(
            [sys.executable, "-m", "hpc_elastic", "rehearse", *options, "train.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 2, done.stderr
        return done.stderr.splitlines()[-1]

    assert "reported no steps" in refused("print('hello')")
    assert "undisturbed, the script ends with exit code" in refused("raise SystemExit(1)")
    assert "ValueError: lr" in refused("import os\nif os.environ['RANK'] == '0': raise ValueError('lr')\ninput()")
    assert "no fault 'meteor'" in refused("", "--faults", "meteor")
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: Invalid account' >&2; exit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    on_cluster = ("--cluster", "slurm", "--allow-local-runs-dir")
    assert "the job can't be submitted: Invalid account" in refused("", *on_cluster)
    kept = tmp_path / "kept"
    text = (
        f"import os, time\nstart = int(open({str(kept)!r}).read()) if os.path.exists({str(kept)!r}) else 0\n"
        "for step in range(start + 1, start + 21):\n"
        f"    time.sleep(0.05); print(f'step {{step}} loss=1.0'); open({str(kept)!r}, 'w').write(str(step))\n"
    )
    assert "finds the checkpoint of the run before" in refused(text, "--faults", "kill-worker")


def test_losses_that_differ_undisturbed_too_are_no_guilt(tmp_path: Path) -> None:
    script = (
        "import random, time\nfor step in range(1, 31):\n    time.sleep(0.05)\n"
        "    print(f'step {step} loss={random.random()}')\n"
    )
    (tmp_path / "train.py").write_text(script)
    _, found = rehearse(tmp_path, "--faults", "kill-worker", "train.py")
    assert found["losses"]["repeatable"] is False
    assert "losses_part" not in {one["of"] for one in found["guilty"]}


EXAMPLES = ROOT / "docs" / "examples"
DIGITS = EXAMPLES / "train_digits.py"


def rehearse_example(folder: Path, script: str, *arguments: str, options: tuple[str, ...] = ()) -> None:
    """One that trains a millisecond in a step is found innocent of kills, also while it saves, and of a notice."""
    (folder / "train.py").write_text((EXAMPLES / script).read_text())
    code, found = rehearse(folder, *options, "--nodes", "2", "--faults", "quick", "train.py", *arguments)
    assert (code, found["guilty"]) == (0, []), found
    assert {one["fault"] for one in found["faults"]} >= {"kill-worker", "kill-saving"}, found
    assert all(one["resumed"] is not None for one in found["faults"]), found


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"), [("train_fsdp.py", ("--epochs", "150")), ("train_in_process.py", ("--steps", "600"))]
)
def test_the_other_examples_of_the_docs_hold(script: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    rehearse_example(tmp_path, script, *arguments)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("flaw", ["", '        optimizer.load_state_dict(state["optimizer"])\n'])
def test_the_docs_example_holds_and_without_the_optimizers_state_it_is_guilty(flaw: str, tmp_path: Path) -> None:
    text = DIGITS.read_text()
    assert flaw in text
    (tmp_path / "train.py").write_text(text.replace(flaw, "") if flaw else text)
    options = ("--nodes", "2", "--faults", "kill-worker" if flaw else "quick")
    code, found = rehearse(tmp_path, *options, "train.py", "--epochs", "30", "--epoch-delay", "0.3")
    assert (code, {one["of"] for one in found["guilty"]}) == ((1, {"losses_part"}) if flaw else (0, set())), found

"""`hpc-elastic doctor` on a real Slurm: what the login node shows, and what the nodes of its own job do."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_runs import SlurmRuns

SHORT = ("-t", "5", "--python", "/usr/bin/python3")


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    found = json.loads(done.stdout)["findings"]
    return {finding["check"]: finding for finding in found}


@pytest.mark.any_release
def test_a_login_node_is_examined_without_a_job(runs: SlurmRuns) -> None:
    done = runs.hpc_elastic("doctor", "--json", "--python", "/usr/bin/python3")
    found = findings(done)
    assert found["slurm.controller"]["level"] == found["partition"]["level"] == "ok"
    assert found["slurm.kill-wait"]["level"] == "warning", "the rig's is 15 s"
    assert not any(check.startswith("nodes.") for check in found)


@pytest.mark.parametrize("cluster", ["emulated"], indirect=True)
def test_nodes_are_examined_in_a_job_of_their_own(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """On emulated NFS, whose caches hold for 3 s: the store is not held back by them. Without a limit of memory."""
    done = runs.hpc_elastic("doctor", "--nodes", "3", "--json", *SHORT, timeout=240)
    found = findings(done)
    assert found["nodes.job"]["found"].endswith("ran on n[1-3]"), done.stdout + done.stderr
    assert found["nodes.signals"]["level"] == "ok", found
    assert "reached the workers" in found["nodes.signals"]["found"]
    assert found["nodes.create"]["level"] == found["nodes.store"]["level"] == "ok", found
    assert found["nodes.memory"]["level"] == "warning", "these nodes limit nothing"
    assert {node["node"] for node in json.loads(done.stdout)["nodes"]} == {"n1", "n2", "n3"}
    assert "(Ctrl-C cancels it)" in done.stderr
    assert not (runs.folder / "runs").exists(), "nothing is left"


def test_a_node_with_a_slow_link_is_named(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    with cluster.disturbed_link("n2", mbit=40):
        done = runs.hpc_elastic("doctor", "--nodes", "4", "--json", *SHORT, timeout=300)
    found = findings(done)
    assert found["network.addresses"]["level"] == found["network.master"]["level"] == "ok", done.stdout + done.stderr
    assert (found["network.clocks"]["level"], found["network.bandwidth"]["level"]) == ("ok", "warning"), found
    assert found["network.bandwidth"]["found"].startswith("n2: 3")
    assert " Mbit/s, where the median of 4 nodes is " in found["network.bandwidth"]["found"]


def test_nodes_that_do_not_see_the_runs_directory_are_a_problem(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """Each host of the rig has a /dev/shm of its own: no node finds the batch script's log there."""
    options = ("--runs-dir", "/dev/shm/doctors-runs", "--allow-local-runs-dir")
    done = runs.hpc_elastic("doctor", "--nodes", "2", *options, *SHORT, timeout=240)
    (line,) = [line for line in done.stdout.splitlines() if " nodes.job: " in line]
    assert line.startswith("problem  nodes.job: it did not run on any node: "), done.stdout + done.stderr
    assert done.returncode == 1


def test_a_node_without_the_installation_is_named_and_the_others_are_examined(
    cluster: SlurmCluster, runs: SlurmRuns
) -> None:
    installation = str(cluster.environment.examples).partition("/source")[0]
    cluster.run(["mount", "--bind", "/mnt", installation], user="root", node="n2", check=True)
    try:
        done = runs.hpc_elastic("doctor", "--nodes", "2", *SHORT, timeout=240)
    finally:
        cluster.run(["umount", installation], user="root", node="n2", check=True)
    (line,) = [line for line in done.stdout.splitlines() if " nodes.job: " in line]
    assert line.startswith("problem  nodes.job: n2: wrote nothing: could not run the agent: exit code 127"), line
    assert "ok       nodes.runs: n1: " in done.stdout
    (run,) = (runs.folder / "runs" / "doctor").iterdir()
    assert f"hpc-elastic report {run}" in done.stderr
    assert runs.hpc_elastic("list").stdout == "", "a doctor's runs are not among the user's own"


def test_nodes_that_are_unlike_each_other_are_found_out(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """n2 has another interpreter at the same path; NVML is not there."""
    python = runs.folder / "python"
    for name, version in (("python", "3.11.2"), ("another", "3.9.18")):
        facts = {"executable": str(python), "version": version, "torch_error": "none"}
        (runs.folder / name).write_text(f"#!/bin/sh\necho '{json.dumps(facts)}'\n")
        (runs.folder / name).chmod(0o755)
    cluster.run(["mount", "--bind", str(runs.folder / "another"), str(runs.folder / "python")], user="root", node="n2")
    options = ("--gpus-per-node", "1", "-t", "5", "--python", str(runs.folder / "python"))
    try:
        done = runs.hpc_elastic("doctor", "--nodes", "2", "--json", *options, timeout=240)
    finally:
        cluster.run(["umount", str(runs.folder / "python")], user="root", node="n2")
    found = {check: (each["level"], each["found"]) for check, each in findings(done).items()}
    assert "nodes.python" in found, done.stdout + done.stderr
    assert found["nodes.python"] == ("warning", f"Python 3.11.2 ({python}) on n1, Python 3.9.18 ({python}) on n2"), (
        found
    )
    assert found["nodes.torch"][0] == "warning"
    assert found["gpu.errors"] == ("ok", "not known on n[1-2]: no NVML")
    assert found["gpu.count"] == ("ok", "1 × GPU on n[1-2]")


def test_what_single_nodes_lack_is_found_there(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """The batch host's scancel does nothing but fail; another node has a small /tmp, and another a full /dev/shm."""
    mounts = (
        ("n1", "/usr/bin/scancel", ("--bind", "/bin/false")),
        ("n2", "/tmp", ("-t", "tmpfs", "-o", "size=32m,mode=1777", "tmpfs")),
        ("n3", "/dev/shm", ("-t", "tmpfs", "-o", "size=16m,mode=1777", "tmpfs")),
    )
    for node, path, how in mounts:
        cluster.run(["mount", *how, path], user="root", node=node, check=True)
    try:
        done = runs.hpc_elastic("doctor", "--nodes", "3", "--json", *SHORT, timeout=240)
    finally:
        for node, path, _ in mounts:
            cluster.run(["umount", "--lazy", path], user="root", node=node, check=True)
    found = [(finding["check"], finding["level"], finding["found"]) for finding in json.loads(done.stdout)["findings"]]
    signals, tmp, shm = (
        [(level, text) for check, level, text in found if check == name and level != "ok"]
        for name in ("nodes.signals", "nodes.tmp", "nodes.shm")
    )
    assert [level for level, _ in signals] == ["problem"], found
    assert signals[0][1].startswith("n[1-3]: giving job ")
    # Others may write a little there meanwhile.
    assert [(level, text.partition(" MiB")[0][:-2]) for level, text in tmp] == [("warning", "n2: /tmp: ")], found
    assert [(level, text.partition(" MiB")[0][:-2]) for level, text in shm] == [("warning", "n3: /dev/shm: ")], found
    assert done.returncode == 1


def test_a_job_that_waits_is_cancelled_with_its_doctor(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    never = ("--begin", "now+1hour")
    done = cluster.run(
        ["timeout", "-s", "INT", "20", "hpc-elastic", "doctor", "--nodes", "2", *never, *SHORT],
        user="alice", cwd=runs.folder, timeout=120,
    )  # fmt: skip
    assert "is pending: BeginTime" in done.stderr, done.stderr
    assert "is cancelled" in done.stderr
    assert cluster.run(["squeue", "-h"], user="alice", cwd="/").stdout == ""

"""The rig is a cluster: several hosts with names and addresses of their own, whose power can be cut."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.rigs.slurm_cluster import CommandFailed, RigError, SlurmCluster, must_run
from tests.rigs.slurm_cluster.hosts import netns_names
from tests.rigs.slurm_cluster.layout import RIGS_FOLDER
from tests.rigs.slurm_cluster.processes import CROWDED, all_pids, command_line, wait_until

PROJECT = Path(__file__).resolve().parents[2]


def sbatch(cluster: SlurmCluster, script: str, *options: str) -> int:
    done = cluster.run(["sbatch", "--parsable", *options], input=f"#!/bin/bash\n{script}\n", check=True)
    return int(done.stdout)


def test_a_job_runs_as_a_normal_user_on_hosts_with_their_own_names_and_addresses(cluster: SlurmCluster) -> None:
    program = "echo $(hostname) $(hostname -I) $(getent hosts $(hostname) | cut -d' ' -f1) $(id -un) $SLURMD_NODENAME"
    done = cluster.run(["srun", "-N4", "bash", "-c", program], check=True)
    rows = sorted(line.split() for line in done.stdout.splitlines())
    assert rows == [[f"n{k}", f"10.77.0.{10 + k}", f"10.77.0.{10 + k}", "alice", f"n{k}"] for k in (1, 2, 3, 4)]
    assert cluster.run(["hostname"]).stdout == "login\n"


def test_rigs_that_make_a_user_together_make_one(cluster: SlurmCluster) -> None:
    """The later of two useradd gave the user another number: nothing in the home of the first rig's was its own."""
    name = f"rig{os.getpid()}"
    program = f"from tests.rigs.slurm_cluster.files import ensure_user; ensure_user({name!r})"
    try:
        several = [subprocess.Popen([sys.executable, "-c", program], cwd=PROJECT) for _ in range(3)]
        assert [one.wait(60) for one in several] == [0] * 3
        assert Path("/home", name).owner() == name
    finally:
        subprocess.run(["userdel", "--remove", name], capture_output=True, check=False)


def test_folders_are_shared_or_private_as_on_a_cluster(cluster: SlurmCluster) -> None:
    write = 'for folder in . "$HOME" /tmp /var/tmp /dev/shm; do echo x > "$folder/mark"; done'
    cluster.run(["bash", "-c", write], node="n1", check=True)
    look = 'for folder in . "$HOME" /tmp /var/tmp /dev/shm; do test ! -e "$folder/mark" || echo "$folder"; done'
    assert cluster.run(["bash", "-c", look], node="n2").stdout.split() == [".", "/home/alice"]
    assert (cluster.shared / "mark").owner() == "alice"
    assert (cluster.home("alice") / "mark").exists()
    refused = cluster.run(["cat", "/home/alice/mark"], user="mallory", node="n2")
    assert refused.returncode != 0
    assert "Permission denied" in refused.stderr


@pytest.mark.parametrize("cluster", ["minute"], indirect=True)
def test_each_host_has_a_caching_mount_of_its_own_and_loses_it_with_its_power(cluster: SlurmCluster) -> None:
    folder = make_folder(cluster, "mounts")

    def seen(host: str) -> str:
        return cluster.run(["bash", "-c", "test -e mark && stat -c %U mark"], node=host, cwd=folder).stdout.strip()

    assert [seen(host) for host in ("login", "n1", "n2")] == ["", "", ""]
    cluster.run(["bash", "-c", "echo $HOSTNAME > mark; echo x > ~/mark"], node="n1", cwd=folder, check=True)
    assert [seen(host) for host in ("login", "n1", "n2")] == ["", "alice", ""], "remembered for a minute"
    cluster.run(["ls"], node="n2", cwd=folder)
    assert [seen(host) for host in ("login", "n2")] == ["", "alice"], "asked again where the folder was opened"
    assert (folder / "mark").owner() == "alice"
    assert cluster.run(["cat", "/home/alice/mark"], node="n2").stdout == "x\n"
    assert cluster.run(["cat", "/home/alice/mark"], node="n2", user="mallory").returncode != 0

    program = "import os, time; os.write(os.open('kept', 65), b'x'); print('ready', flush=True); time.sleep(300)"
    with cluster.popen(["python", "-c", program], node="n2", cwd=folder) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        cluster.kill_node("n2")
        process.wait(timeout=20 * CROWDED)
    assert (folder / "kept").read_text() == "", "what was not written back went with the power"
    with pytest.raises(RigError, match="'n2' has no emulated mount"):
        cluster.tell_client("n2", "counters")
    cluster.start_node("n2")
    assert seen("n2") == "alice"
    assert cluster.tell_client("n2", "counters")["counters"]["lookup"] > 0


def test_jobs_have_a_python_with_the_projects_source_and_no_stranger_in_their_environment(
    cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    program = (
        "import hpc_elastic, importlib.metadata as m, os, shutil, psutil, filelock, submitit, click, jinja2\n"
        "print(hpc_elastic.__file__, m.version('hpc_elastic'), shutil.which('hpc-elastic'))\n"
        "print([name for name in os.environ if name.startswith(('SLURM', 'SBATCH'))])"
    )
    first, second = cluster.run(["python", "-c", program], node="n3", check=True).stdout.splitlines()
    file, version, script = first.split()
    environment = cluster.environment
    assert environment is not None
    assert (file, script) == (f"{environment.source}/hpc_elastic/__init__.py", f"{environment.bin}/hpc-elastic")
    assert version
    assert second == "[]"
    original = PROJECT / "hpc_elastic" / "__init__.py"
    assert Path(file).read_bytes() == original.read_bytes()


def test_a_requeued_job_runs_again_after_the_short_delay_and_sacct_tells(cluster: SlurmCluster) -> None:
    script = 'echo "$SLURM_RESTART_COUNT" >> runs; test -n "$SLURM_RESTART_COUNT" || sleep 60'
    job = sbatch(cluster, script, "--requeue", "--open-mode=append", f"--chdir={make_folder(cluster, 'requeue')}")
    runs = cluster.shared / "requeue" / "runs"
    wait_until(runs.exists, timeout=20, what="the job's first run")
    started = time.monotonic()
    cluster.run(["scontrol", "requeue", str(job)], check=True)
    cluster.wait_job(job, "PENDING", timeout=20)
    assert cluster.wait_job(job, timeout=40) == "COMPLETED"
    assert time.monotonic() - started < 100  # Slurm's own default is 121 s
    assert runs.read_text().split("\n") == ["", "1", ""]
    assert cluster.job_info(job)["Restarts"] == "1"

    def told() -> bool:
        states = {row["JobID"]: row["State"] for row in cluster.sacct(job)}
        return states.get(str(job)) == "COMPLETED" and f"{job}.batch" in states

    wait_until(told, timeout=20, what="sacct tells of the job's end", interval=0.2)


def make_folder(cluster: SlurmCluster, name: str) -> Path:
    cluster.run(["mkdir", name], check=True)
    return cluster.shared / name


def test_heal_undoes_what_a_test_did(cluster: SlurmCluster) -> None:
    sbatch(cluster, "trap '' TERM; srun sleep 300", "-N3")
    cluster.drain("n4")
    cluster.kill_node("n3")
    cluster.kill_process("n1", r"/slurmd$|^slurmd\b")
    cluster.cut_link("n2")
    cluster.stop_slurmctld()
    cluster.heal()
    assert set(cluster.node_states().values()) == {"idle"}
    assert cluster.run(["srun", "-N4", "true"]).returncode == 0


def test_a_cluster_becomes_another_site_until_it_is_healed(cluster: SlurmCluster) -> None:
    def setting(name: str) -> str:
        lines = cluster.run(["scontrol", "show", "config"], check=True).stdout.splitlines()
        return next(line.split("=", 1)[1].strip() for line in lines if line.split("=")[0].strip() == name)

    job = sbatch(cluster, "sleep 300", "-N1")
    cluster.wait_job(job, "RUNNING")
    refused = cluster.run(["scontrol", "requeue", str(job)], user="mallory")
    cluster.reconfigure(
        {"SlurmdTimeout": 300, "JobRequeue": 0}, extra_lines=["PartitionName=high Nodes=ALL PriorityTier=9"]
    )
    assert (setting("SlurmdTimeout"), setting("JobRequeue")) == ("300 sec", "0")
    assert "high" in cluster.run(["sinfo", "-ho", "%R"]).stdout.split()
    cluster.reconfigure({"AccountingStorageType": "accounting_storage/none"}, restart=True)
    assert setting("AccountingStorageType") == "accounting_storage/none"
    assert setting("SlurmdTimeout") == "20 sec", "changes are from the rig's own, not from those before"
    assert cluster.job_state(job) == "RUNNING"
    cluster.refuse_requeue()
    # As Slurm itself says it to who may not.
    denied = cluster.run(["scontrol", "requeue", str(job)])
    assert (denied.returncode, denied.stderr) == (refused.returncode, refused.stderr)
    assert denied.returncode != 0
    cluster.heal()
    assert (setting("SlurmdTimeout"), setting("JobRequeue")) == ("20 sec", "1")
    assert cluster.run(["sinfo", "-ho", "%R"]).stdout.split() == ["main"]
    again = sbatch(cluster, "sleep 300", "-N1")
    cluster.wait_job(again, "RUNNING")
    assert cluster.run(["scontrol", "requeue", str(again)]).returncode == 0
    wait_until(lambda: bool(cluster.sacct(again)), timeout=20, what="the accounting is there again", interval=0.2)


def test_commands_end_when_they_are_told_to(cluster: SlurmCluster) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.run(["sleep", "300"], node="n4", timeout=0.5)
    program = "trap 'echo got TERM; exit 7' TERM; echo ready; while true; do sleep 0.05; done"
    with cluster.popen(["bash", "-c", program], node="n4") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.readline() == "got TERM\n"
    assert process.returncode == 7
    with cluster.popen(["sleep", "301"], node="n4") as process:
        wait_until(lambda: bool(cluster.node_pids("n4", user="alice")), timeout=10, what="sleep runs")
        cluster.kill_process("n4", "^sleep 301", signal.SIGUSR1)
    assert process.returncode == -signal.SIGUSR1
    assert cluster.node_pids("n4", user="alice") == []
    with pytest.raises(RigError, match="no process on n4 matches"):
        cluster.kill_process("n4", "^sleep 301")
    with pytest.raises(CommandFailed, match="No such file"):
        cluster.run(["ls", "/nonesuch"], check=True)


@pytest.mark.slow
def test_a_rig_whose_owner_was_killed_is_cleaned_up_by_name_and_its_neighbour_is_left_alone(
    cluster: SlurmCluster,
) -> None:
    name = f"left{os.getpid()}"
    program = (
        "import signal; from tests.rigs.slurm_cluster import SlurmCluster\n"
        f"SlurmCluster(1, name={name!r}, accounting=False, python=False).start()\n"
        "print('up', flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=PROJECT, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "up\n"
            with pytest.raises(RigError, match=f"rig '{name}' is in use by process {owner.pid}"):
                SlurmCluster.remove(name)
        finally:
            owner.kill()
    try:
        assert len(netns_names(name)) == 4  # a switch, ctl, login, n1: the rig outlived its owner
        with SlurmCluster(1, name=name, accounting=False, python=False) as again:
            assert again.run(["srun", "hostname"]).stdout == "n1\n"
            # Whatever has the rig's name in its command line: the hosts' first processes have.
            assert any(name in command_line(pid) for pid in all_pids())
    finally:
        SlurmCluster.remove(name)
    assert netns_names(name) == []
    assert [line for pid in all_pids() if name in (line := command_line(pid))] == []
    assert list(RIGS_FOLDER.glob(f"{name}*")) == []
    assert name not in Path("/proc/mounts").read_text()
    assert cluster.run(["srun", "-N4", "true"]).returncode == 0


@pytest.mark.slow
def test_the_rig_works_by_hand(slurm_can_run: None) -> None:
    name = f"hand{os.getpid()}"

    def rig(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "tests.rigs.slurm_cluster", "--name", name, *arguments]
        return subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, timeout=120 * CROWDED, check=False)

    try:
        up = rig("up", "2", "--no-accounting", "--no-python", "--gpus", "2")
        assert up.returncode == 0, up.stderr
        assert up.stdout.startswith("2 nodes are up after ")
        seen = rig("run", "--", "srun", "-N2", "--gres=gpu:1", "bash", "-c", "echo $(hostname) $CUDA_VISIBLE_DEVICES")
        assert sorted(seen.stdout.splitlines()) == ["n1 0", "n2 0"], seen.stderr
        assert rig("run", "--user", "mallory", "--node", "n2", "--", "bash", "-c", "id -un; exit 3").returncode == 3
        assert rig("kill-node", "n2").returncode == 0
        gone = rig("run", "--node", "n2", "--", "true")
        assert gone.returncode == 1
        assert gone.stderr == f"slurm_cluster: host 'n2' of rig {name} is off\n"
        assert rig("start-node", "n2").returncode == 0
        assert rig("drain", "n1").returncode == 0
        assert "drained" in rig("status").stdout
        assert rig("undrain", "n1").returncode == 0
        assert rig("up", "1", "--no-accounting", "--no-python").returncode == 0
        assert rig("run", "--", "sinfo", "-ho", "%D").stdout.strip() == "1"
    finally:
        down = rig("down")
    assert (down.returncode, down.stdout) == (0, f"rig {name} is down\n")
    assert rig("down").returncode == 0
    assert netns_names(name) == []
    assert list(RIGS_FOLDER.glob(f"{name}*")) == []
    absent = rig("status")
    assert absent.returncode == 1
    assert absent.stderr.startswith(f"slurm_cluster: no rig '{name}' is up")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"CI": "true"}, True),
        ({"CI": "false"}, False),
        ({"HPC_ELASTIC_REQUIRE_SLURM": "1"}, True),
        ({"HPC_ELASTIC_REQUIRE_SLURM": "0"}, False),
    ],
)
def test_the_tier_is_never_skipped_where_it_must_run(environment: dict[str, str], expected: bool) -> None:
    assert must_run(environment) is expected

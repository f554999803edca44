"""A site with rules: control groups, bound CPUs, X11 and Contain, limits of a QOS, a plugin, users without a shell."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_runs import SHORT, SlurmRuns

# Refuses what has no QOS, and has something to say of what it takes.
SUBMIT_RULES = """
function slurm_job_submit(job, partitions, uid)
  if job.qos == nil then
    slurm.log_user("Jobs here need a QOS.\\nSee https://hpc.example/qos")
    return slurm.ERROR
  end
  slurm.log_user("17 core-hours are left to you")
  return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""
NO_LOGIN = "#!/bin/sh\necho This account is currently not available.\nexit 1\n"
# In the first attempt rank 1 takes more memory than its node's job has, and then rank 0 dies.
FAILS_TWICE = """
import os, signal, time
rank, again = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("rank", rank, "has", len(os.sched_getaffinity(0)), "CPUs", flush=True)
if os.environ["HPC_ELASTIC_ATTEMPT"] == "0":
    if again == "0" and rank == "1":
        taken = [bytearray(16 << 20) for _ in range(64)]
    if again == "1" and rank == "0":
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(120)
print("rank", rank, "is done")
"""


@pytest.fixture
def site(slurm_can_run: None) -> Iterator[SlurmCluster]:
    """Two nodes. Alice may have one job at a time in the QOS ``one``, and jobs of one node in ``small``."""
    settings = {"TaskPlugin": "task/cgroup,task/affinity", "PrologFlags": "X11,Contain"}
    with SlurmCluster(2, cgroups=True, cred_expire=5, settings=settings) as cluster:
        for words in (
            "add account team",
            "add user alice account=team",
            "add qos one set MaxSubmitJobsPerUser=1",
            "add qos small set MaxTRESPerJob=node=1 Flags=DenyOnLimit",
            "modify user alice set qos=one,small",
        ):
            argv = ["sacctmgr", "--immediate", *words.split()]
            cluster.run(argv, user="root", node="ctl", check=True)
        (cluster.layout.etc / "job_submit.lua").write_text(SUBMIT_RULES)
        rules = {"JobSubmitPlugins": "lua", "AccountingStorageEnforce": "associations,limits,qos"}
        cluster.reconfigure(rules, restart=True)
        su = cluster.layout.etc / "su"
        su.write_text(NO_LOGIN)
        su.chmod(0o755)
        for node in cluster.node_names:  # not /etc/passwd: another rig's useradd would take such a mount away
            cluster.run(["mount", "--bind", "/etc/slurm/su", "/usr/bin/su"], user="root", node=node, check=True)
        cluster.wait_nodes_ready()
        yield cluster


def test_a_run_on_a_site_with_rules(site: SlurmCluster) -> None:
    runs = SlurmRuns(site)
    script = runs.script(FAILS_TWICE)
    for options, said in (
        ((), "sbatch: Jobs here need a QOS; See https://hpc.example/qos"),
        (("-q", "small", "--nodes", "2"), "QOSMaxNodePerJobLimit"),
    ):
        refused = runs.hpc_elastic("submit", *options, *SHORT, script)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (1, 1), refused.stderr
        assert said in refused.stderr
        assert not (runs.folder / "runs").exists()
    _examine(runs)
    # Slurm asks su for the environment of a job that brings none. Without a login shell it gets none, not even PATH.
    options = ("-q", "one", "--nodes", "2", "-c", "2", "--mem", "400", "--export", "NONE", "--max-restarts", "1")
    run = runs.submit_and_follow(*options, "--requeue-with", "chain", *SHORT, script)
    assert run.done is not None
    assert "17 core-hours are left to you" in run.done.stderr
    out_of_memory, ended = (item["failures"][0]["first"] for item in run.report()["attempts"][0]["rounds"])
    assert (out_of_memory["global_rank"], out_of_memory["failure_class"]) == (1, "infrastructure"), run.log
    assert out_of_memory["oom_kills"] > 0
    assert (ended["global_rank"], ended["signal"]) == (0, "SIGTERM")
    assert "rank 0 has 2 CPUs" in run.log
    # A second job is one too many until this one has ended.
    assert "requeue enabled: yes, by a follow-on job" in run.log
    assert run.done.returncode == 1, run.log
    way_out = f"hpc-elastic requeue {run.root.name}"
    assert "QOSMaxSubmitJobPerUserLimit" in run.result()["decision"]
    assert way_out in run.result()["decision"]
    assert runs.hpc_elastic(*way_out.split()[1:]).returncode == 0
    site.wait_job(run.job, {"COMPLETED"}, timeout=60)
    assert run.result(1)["outcome"] == "succeeded", run.log
    steps = {row["JobID"].partition(".")[2] for row in site.sacct(run.job)}
    assert {"extern", "batch", "0"} <= steps


def _examine(runs: SlurmRuns) -> None:
    """What doctor says of such a site: the rule that refuses jobs, and that memory is limited."""
    small = ("doctor", "--nodes", "2", "-t", "5", "--python", "/usr/bin/python3", "--mem", "400", "-c", "2", "--json")
    refused = json.loads(runs.hpc_elastic(*small).stdout)["findings"][-1]
    assert (refused["check"], refused["level"]) == ("nodes.job", "problem")
    assert "Jobs here need a QOS" in refused["found"]
    done = runs.hpc_elastic(*small, "-q", "one", timeout=240)
    found = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["nodes.memory"]["level"] == "ok", done.stdout + done.stderr
    assert found["nodes.memory"]["found"].endswith("the cgroup's limit of 400.0 MiB"), found
    assert found["nodes.signals"]["level"] == "ok"
    # What the QOS allows is known without a job; and what was kept is judged anew for what submit asks for.
    limits = json.loads(runs.hpc_elastic("doctor", "-q", "small", "--python", "/usr/bin/python3", "--json").stdout)
    (limit,) = [finding for finding in limits["findings"] if finding["check"] == "slurm.limits"]
    assert limit["level"] == "problem"
    assert limit["found"] == "a job of this account in QOS small has at most 1 node (MaxTRES)"
    kept = runs.hpc_elastic("doctor", "-q", "one", "--python", "/usr/bin/python3", "--save")
    assert "kept in /" in kept.stderr
    (runs.folder / "quiet.py").write_text("")
    warned = runs.hpc_elastic("submit", "-q", "small", "--nodes", "2", "--dry-run", "quiet.py")
    assert "doctor found: slurm.limits: a job of this account in QOS small has at most 1 node" in warned.stderr
    fits = runs.hpc_elastic("submit", "-q", "small", "--nodes", "1", "--dry-run", "quiet.py")
    assert "slurm.limits" not in fits.stderr

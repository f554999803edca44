"""A victim copies an attacker's run, say to look into its failure: what is in the copy belongs to the victim now."""

from __future__ import annotations

from pathlib import Path

from tests.rigs.two_users import User

_SUBMIT = """
import os, sys, time
from hpc_elastic.submission.executor import ElasticExecutor

class Attack:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[1]}/attacked-by-$(id -u)",)

def return_it(marker_folder, attack=None):
    sys.argv[1:] = [marker_folder]
    return Attack()

executor = ElasticExecutor("jobs", cluster="local")
job = executor.submit(return_it, sys.argv[1], Attack())
job.wait()
page = job.run_dir / "attempt-000" / "report.html"
while not page.exists():
    time.sleep(0.05)  # the supervisor's last file: what comes later would keep the mode that it is made with
print(job.job_id, job.run_dir)
"""

_READ = """
import sys
from pathlib import Path
from hpc_elastic.submission.job import ElasticJob

job = ElasticJob("jobs", sys.argv[1], run_dir=Path(sys.argv[2]))
print("ended", job.done(), job.report()[:40])
for read in (job.result, job.submission):
    try:
        read()
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_nothing_is_unpickled_from_a_copied_run(attacker: User, victim: User, shared: Path) -> None:
    made = attacker.python(_SUBMIT, shared, cwd=shared, timeout=120).stdout.split()
    job_id, run_dir = made[-2], Path(made[-1])
    # The function itself was unpickled by the attacker's own worker: the attack works where it is read.
    assert (shared / f"attacked-by-{attacker.uid}").exists()
    attacker.run(["chmod", "-R", "a+rX", str(shared / "jobs")], check=True)
    for copy in (["cp", "-r"], ["cp", "-a", "--no-preserve=ownership"]):
        victim.run([*copy, str(run_dir), str(victim.home / "copy")], check=True)
        victim.run(["chmod", "-R", "go-rwx", str(victim.home / "copy")], check=True)
        done = victim.python(_READ, job_id, victim.home / "copy")
        assert done.stdout.startswith("ended True")
        assert done.stdout.count("is a copy") == 2, done.stdout + done.stderr
        victim.run(["rm", "-rf", str(victim.home / "copy")], check=True)
    direct = victim.python(_READ, job_id, run_dir, check=False)
    assert f"belongs to uid {attacker.uid}" in direct.stderr
    assert not (shared / f"attacked-by-{victim.uid}").exists()

"""A run by the local launcher that nothing disturbs: what the workers find, what is written where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rigs.local_run import LocalRun, open_to_others

_TELL_ENVIRONMENT = """
tell("here", environ=dict(os.environ), argv=sys.argv, cwd=os.getcwd(), session=os.getsid(0),
     stdin=os.readlink("/proc/self/fd/0"))
print("out of", RANK)
print("err of", RANK, file=sys.stderr)
"""


def test_workers_get_torchruns_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    arguments = ["--lr", "0.1", "a b", "it's $HOME", "line\nbreak", "ünï", ""]
    with LocalRun(tmp_path, _TELL_ENVIRONMENT, nproc=2, arguments=arguments, environ={"MINE": "x y"}) as run:
        assert run.finish() == 0
        workers = run.moments("here")
        assert sorted(worker["rank"] for worker in workers) == [0, 1, 2, 3]
        masters = set()
        for worker in workers:
            env, rank = worker["environ"], worker["rank"]
            node = rank // 2
            expected = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % 2),
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": str(node),
                "GROUP_WORLD_SIZE": "2",
                "ROLE_RANK": str(rank),
                "ROLE_WORLD_SIZE": "4",
                "ROLE_NAME": "default",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "3",
                "TORCHELASTIC_RUN_ID": run.paths.run_id,
                "TORCHELASTIC_ERROR_FILE": str(run.rank(rank).error_file),
                "OMP_NUM_THREADS": "1",
                "PYTHONFAULTHANDLER": "1",
                "HPC_ELASTIC_RUN_DIR": str(run.paths.root),
                "HPC_ELASTIC_ATTEMPT": "0",
                "MINE": "x y",
            }
            assert {key: env.get(key) for key in expected} == expected
            assert env["TORCHELASTIC_USE_AGENT_STORE"] in ("True", "False")
            masters.add((env["MASTER_ADDR"], env["MASTER_PORT"]))
            assert worker["argv"] == [str(run.script_path), *arguments]
            assert worker["cwd"] == str(tmp_path)
            assert worker["session"] == worker["pid"]
            assert worker["stdin"] == "/dev/null"
        assert len(masters) == 1
        address, port = masters.pop()
        assert address == "127.0.0.1"
        assert int(port) > 0


def test_one_worker_per_node_keeps_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    with LocalRun(tmp_path, _TELL_ENVIRONMENT, nodes=1) as run:
        assert run.finish() == 0
        (worker,) = run.moments("here")
        assert "OMP_NUM_THREADS" not in worker["environ"]


def test_job_log_tells_where_things_are(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _TELL_ENVIRONMENT) as run:
        assert run.finish() == 0
        log = run.log()
        first = log.index("round 0: role default")
        for words in (
            run.paths.run_id,
            str(run.paths.root),
            "rank logs: hpc-elastic logs ",
            "requeue enabled:",
            "python 3.",
            "node[0-1]",
        ):
            assert 0 <= log.find(words) < first, words
        assert "SUCCEEDED" in run.attempt().report_text.read_text()
        assert run.attempt().report_text.read_text().strip() in log
        result = json.loads(run.attempt().result_json.read_text())
        assert (result["outcome"], result["exit_code"]) == ("succeeded", 0)


def test_run_is_private_whatever_the_umask_and_workers_get_the_users(tmp_path: Path) -> None:
    script = """
    mask = os.umask(0)
    with open(sys.argv[1] + f"/made-by-{RANK}", "w"):
        pass
    tell("here", umask=mask)
    """
    with LocalRun(tmp_path, script, umask=0o000, arguments=[str(tmp_path)]) as run:
        assert run.finish() == 0
        assert [worker["umask"] for worker in run.moments("here")] == [0, 0]
        assert open_to_others(run.paths.root) == []
        assert run.paths.secret.stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "made-by-0").stat().st_mode & 0o777 == 0o666

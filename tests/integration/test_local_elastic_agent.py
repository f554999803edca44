"""`LocalElasticAgent`: real processes, Python functions, over the rendezvous on files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.agent import LocalElasticAgent, WorkerGroupFailureError, WorkerSpec, WorkerState
from hpc_elastic.errors import UsageError
from hpc_elastic.rendezvous.handler import FileRendezvousHandler
from hpc_elastic.rendezvous.handler_config import config_from_url
from hpc_elastic.run.spec import EntryKind, Entrypoint
from tests.rigs.submitted_functions import outlives_its_return
from tests.rigs.waiting import until


def handler_at(folder: Path) -> FileRendezvousHandler:
    folder.mkdir(exist_ok=True)
    return FileRendezvousHandler(config_from_url(f"fs://{folder}/run?min_workers=1&timeout=60"))


def an_agent(tmp_path: Path, entrypoint: Any, *args: Any, workers: int = 2, **kwargs: Any) -> LocalElasticAgent:
    spec_keys = {"max_restarts", "role", "master_port", "monitor_interval"}
    values = {"max_restarts": 0, **{key: value for key, value in kwargs.items() if key in spec_keys}}
    spec = WorkerSpec("default", workers, entrypoint, args, handler_at(tmp_path / "rdzv"), **values)
    rest = {key: value for key, value in kwargs.items() if key not in spec_keys}
    return LocalElasticAgent(spec, log_dir=tmp_path / "logs", **rest)


def add_rank(base: int) -> int:
    return base + int(os.environ["RANK"])


def test_what_functions_return_comes_back_by_global_rank(tmp_path: Path) -> None:
    result = an_agent(tmp_path, add_rank, 100).run()
    assert result.return_values == {0: 100, 1: 101}
    assert result.state is WorkerState.SUCCEEDED


def test_a_function_that_has_returned_is_held_until_the_others_have(tmp_path: Path) -> None:
    """Where its process group was not destroyed, its end would abort them."""
    assert an_agent(tmp_path, outlives_its_return, tmp_path).run().return_values == {0: True, 1: True}


def leaves_without_a_word() -> None:
    if os.environ["RANK"] == "1":
        os._exit(0)


def test_one_that_leaves_without_a_result_holds_no_other(tmp_path: Path) -> None:
    an_agent(tmp_path, leaves_without_a_word).run()


def test_what_cannot_be_handed_over_is_refused_by_name(tmp_path: Path) -> None:
    lock = threading.Lock()

    def uses_a_lock() -> None:
        with lock:
            pass

    with pytest.raises(UsageError, match="uses_a_lock"):
        an_agent(tmp_path, uses_a_lock)


def test_a_return_value_that_cannot_be_handed_back_fails_its_rank(tmp_path: Path) -> None:
    def returns_a_generator() -> Any:
        return (number for number in range(3))

    with pytest.raises(WorkerGroupFailureError) as caught:
        an_agent(tmp_path, returns_a_generator, workers=1).run()
    (failure,) = caught.value.get_worker_exceptions().values()
    assert "can't be handed back" in failure.headline


def test_a_failing_function_is_told_with_its_rank_and_traceback(tmp_path: Path) -> None:
    def one_fails() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("boom on rank 1")
        time.sleep(600)

    agent = an_agent(tmp_path, one_fails, shutdown_timeout=5.0)
    began = time.monotonic()
    with pytest.raises(WorkerGroupFailureError, match="rank 1") as caught:
        agent.run()
    assert time.monotonic() - began < 100, "the other worker was ended, and not waited for"
    assert list(caught.value.get_worker_exceptions()) == [1]
    assert "boom on rank 1" in caught.value.get_worker_exceptions()[1].headline
    assert agent.get_worker_group().state is WorkerState.FAILED


def test_a_restart_is_a_new_round_for_all_its_workers(tmp_path: Path) -> None:
    def fails_once() -> str:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
            os._exit(3)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(600)
        return os.environ["TORCHELASTIC_RESTART_COUNT"]

    agent = an_agent(tmp_path, fails_once, max_restarts=1, shutdown_timeout=5.0)
    assert agent.run().return_values == {0: "1", 1: "1"}
    assert agent.get_worker_group().restarts_used == 1


def test_a_script_gets_its_arguments_and_returns_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys; print(os.environ['RANK'], sys.argv[1])\n")
    agent = an_agent(tmp_path, str(script), "hello")
    assert agent.run().return_values == {}
    logs = sorted((tmp_path / "logs").rglob("stdout.log"))
    assert [path.read_text() for path in logs] == ["0 hello\n", "1 hello\n"]


@pytest.mark.parametrize(
    "entrypoint",
    ["true", Entrypoint(kind=EntryKind.MODULE, target="this", python=sys.executable)],
    ids=["command", "module"],
)
def test_a_command_and_a_module(tmp_path: Path, entrypoint: Any) -> None:
    assert an_agent(tmp_path, entrypoint).run().return_values == {}


@pytest.mark.parametrize(
    ("entrypoint", "said"),
    [
        ("missing/train.py", "entrypoint='missing/train.py' is not there"),
        (Path("/missing/train.py"), "entrypoint='/missing/train.py' is not there"),
        ("/missing/command", "entrypoint='/missing/command' is not there"),
        ("hpc-elastic-no-such-command", "'hpc-elastic-no-such-command': no such command in PATH"),
        (Entrypoint(kind=EntryKind.SCRIPT, target="missing"), "entrypoint='missing' is not there"),
        (Entrypoint(kind=EntryKind.COMMAND, target="./train.py"), "entrypoint='./train.py' is not there"),
    ],
    ids=str,
)
def test_what_is_not_there_is_refused_by_name_before_anybody_is_waited_for(
    tmp_path: Path, entrypoint: Any, said: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        an_agent(tmp_path, entrypoint)


def run_two_nodes(tmp_path: Path, work: str) -> list[dict[int, Any]]:
    """Two processes with an agent each, of one and of two workers: the library's agent wants the main thread.

    Returns what the function `work` returned, by global rank, for each.
    """
    program = tmp_path / "node.py"
    program.write_text(
        textwrap.dedent(
            """
            import json, os, sys, time
            from hpc_elastic.agent import LocalElasticAgent, WorkerSpec
            from hpc_elastic.rendezvous.handler import FileRendezvousHandler
            from hpc_elastic.rendezvous.handler_config import config_from_url
            """
        )
        + textwrap.dedent(work)
        + textwrap.dedent(
            """
            handler = FileRendezvousHandler(config_from_url(sys.argv[1]))
            spec = WorkerSpec("default", int(sys.argv[2]), work, (), handler, monitor_interval=100.0)
            print(json.dumps(LocalElasticAgent(spec).run().return_values))
            """
        )
    )
    (tmp_path / "rdzv").mkdir()
    url = f"fs://{tmp_path}/rdzv/two?min_workers=2&max_workers=2&timeout=60"
    nodes = [
        subprocess.Popen([sys.executable, str(program), url, str(size)], stdout=subprocess.PIPE, text=True)
        for size in (1, 2)
    ]
    told = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], told
    return [{int(rank): value for rank, value in json.loads(text.splitlines()[-1]).items()} for text in told]


def test_two_nodes_meet_and_share_ranks(tmp_path: Path) -> None:
    out = run_two_nodes(
        tmp_path,
        """
        def work():
            return [os.environ[k] for k in ("RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_PORT")]
        """,
    )
    assert sorted(rank for values in out for rank in values) == [0, 1, 2]
    facts = [fact for values in out for fact in values.values()]
    assert {fact[1] for fact in facts} == {"3"}
    assert len({fact[3] for fact in facts}) == 1


def test_a_failure_on_one_node_starts_the_other_again_without_waiting_for_its_next_look(tmp_path: Path) -> None:
    began = time.monotonic()
    out = run_two_nodes(
        tmp_path,
        """
        def work():
            first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            if first and os.environ["RANK"] == "0":
                time.sleep(0.5)
                raise ValueError("boom")
            if first:
                time.sleep(600)
            return os.environ["TORCHELASTIC_RESTART_COUNT"]
        """,
    )
    assert {value for values in out for value in values.values()} == {"1"}
    assert time.monotonic() - began < 80, "its monitor_interval is 100 s: it has to be told"


def test_children_of_the_program_itself_are_left_alone(tmp_path: Path) -> None:
    def sleeping() -> set[str]:
        listed = subprocess.run(["pgrep", "-P", str(os.getpid()), "-x", "sleep"], capture_output=True, text=True)
        return set(listed.stdout.split())

    before = sleeping()  # another test's, which may still be ending
    own = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:

        def leaves_a_daemon() -> None:
            subprocess.Popen(["sleep", "60"], start_new_session=True)
            os._exit(4)

        with pytest.raises(WorkerGroupFailureError):
            an_agent(tmp_path, leaves_a_daemon, workers=1, shutdown_timeout=2.0).run()
        assert own.poll() is None, "the program's own child was ended"
        assert sleeping() - before == {str(own.pid)}, "the worker's daemon outlived it"
    finally:
        own.kill()
        own.wait()


def test_ctrl_c_ends_the_workers(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()

    def waits() -> None:
        (pids / str(os.getpid())).touch()
        time.sleep(600)

    agent = an_agent(tmp_path, waits, shutdown_timeout=5.0)
    main = os.getpid()

    def interrupt() -> None:
        until(lambda: len(list(pids.iterdir())) == 2, "both workers")
        os.kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        agent.run()
    for pid in pids.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.name), 0)


def hangs_on_rank_1(rounds: int) -> str:
    import hpc_elastic

    rank, index = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if rank == "1" and index < rounds:  # the others tell nothing: on a busy machine their end might take as long
        hpc_elastic.heartbeat(step=3)
        time.sleep(600)
    if index < rounds:
        time.sleep(600)
    return f"rank {rank} in round {index}"


def test_a_worker_that_hangs_is_found_by_its_heartbeats_and_restarted(tmp_path: Path) -> None:
    agent = an_agent(
        tmp_path,
        hangs_on_rank_1,
        1,
        max_restarts=1,
        monitor_interval=100.0,
        section_timeouts="step:0.5",
        shutdown_timeout=5.0,
    )
    began = time.monotonic()
    assert agent.run().return_values == {0: "rank 0 in round 1", 1: "rank 1 in round 1"}
    assert time.monotonic() - began < 80, "long before its monitor_interval"
    (stacks,) = (tmp_path / "logs").glob("round-000/rank-00001/stacks.txt")
    assert "hangs_on_rank_1" in stacks.read_text()
    assert not list(Path("/dev/shm").glob(f"hpc-elastic-beats.{agent._tag.agent_uid}*")), "its folder on the node"


def test_a_hang_that_no_restart_is_left_for_is_told_with_its_step(tmp_path: Path) -> None:
    agent = an_agent(tmp_path, hangs_on_rank_1, 1, section_timeouts="step:0.5", shutdown_timeout=5.0)
    with pytest.raises(WorkerGroupFailureError) as caught:
        agent.run()
    ((rank, failure),) = caught.value.get_worker_exceptions().items()
    assert (rank, failure.failure_class.value, failure.last_step) == (1, "hang", 3)
    assert "hangs_on_rank_1" in failure.traceback


def test_section_timeouts_that_make_no_sense_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="section_timeouts step=1"):
        an_agent(tmp_path, add_rank, 1, section_timeouts="step=1")

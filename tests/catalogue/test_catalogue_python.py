"""Python code that fails: what its exception says, and that the report says the same."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.rigs.failure_catalogue import MEET, Catalogue, Told

_EXCEPTION = "uncaught exception"


def told(cause: str, **changes: Any) -> Told:
    """An uncaught exception of rank 1 on node 1."""
    values: dict[str, Any] = {
        "exit_code": 1,
        "cause": cause,
        "rank": 1,
        "host": "node1",
        "failure_class": "root",
        "category": "worker",
        "retryable": True,
        "confidence": "high",
        "evidence": "first of 2; the other was stopped within <N> ms",
        "kind": _EXCEPTION,
    }
    return Told(**{**values, **changes})


def test_an_exception_on_one_rank(catalogue: Catalogue) -> None:
    script = f"""
    {MEET}
    def train_one_step(batch):
        return 1 / batch

    if RANK == 2:
        train_one_step(0)
    wait_for("never")
    """
    with catalogue.run(script, nproc=2) as run:
        run.finish()
        catalogue.check(
            run,
            "exception-on-one-rank",
            told(
                "ZeroDivisionError: division by zero",
                rank=2,
                evidence="first of 4; the others were stopped within <N> ms",
            ),
        )


def test_the_same_exception_on_all_ranks(catalogue: Catalogue) -> None:
    """Each rank names another file, and it is the same failure all the same. Rank 0 is the first to come to it."""
    script = f"""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # else who is ended before it has failed is not counted
    {MEET}
    def load_config(path):
        return open(path)

    if RANK > 0:
        wait_for("the-others")
    load_config(f"/data/run-{{RANK}}/config.yaml")
    """
    with catalogue.run(script, nproc=2) as run:
        run.until(lambda: run.events("workers_stopping"), "the end of rank 0")
        run.say("the-others")
        run.finish()
        expected = told(
            "FileNotFoundError: [Errno 2] No such file or directory: '/data/run-0/config.yaml'",
            rank=0,
            host="node0",
            evidence="the same failure on 4 ranks (0-3); this one was seen first",
        )
        catalogue.check(run, "exception-on-all-ranks", expected)


def test_chained_exceptions(catalogue: Catalogue) -> None:
    """One raised from another, and a third while that is handled."""
    script = f"""
    {MEET}
    def read(index):
        return {{0: "a"}}[index]

    def load(index):
        try:
            return read(index)
        except KeyError as error:
            raise RuntimeError(f"sample {{index}} cannot be loaded") from error

    def train():
        try:
            load(7)
        except RuntimeError:
            logger.error("skipped")

    if RANK == 1:
        train()
    wait_for("never")
    """
    with catalogue.run(script) as run:
        run.finish()
        catalogue.check(run, "exceptions-chained", told("NameError: name 'logger' is not defined"))
        text = run.attempt().report_text.read_text()
        assert "caused by : RuntimeError: sample 7 cannot be loaded" in text
        assert "caused by : KeyError: 7" in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no exception groups")
def test_an_exception_group(catalogue: Catalogue) -> None:
    script = f"""
    {MEET}
    def check(value):
        raise ValueError(f"shard {{value}} is empty")

    def check_all():
        errors = []
        for value in range(3):
            try:
                check(value)
            except ValueError as error:
                errors.append(error)
        raise ExceptionGroup("unusable data", errors)

    if RANK == 1:
        check_all()
    wait_for("never")
    """
    with catalogue.run(script) as run:
        run.finish()
        inside = "; ".join(f"ValueError: shard {value} is empty" for value in range(3))
        expected = told(f"ExceptionGroup: unusable data (3 sub-exceptions); in it: {inside}")
        catalogue.check(run, "exception-group", expected)


def test_a_syntax_error_in_the_script(catalogue: Catalogue) -> None:
    with catalogue.run("def train(:\n    pass\n", nodes=1) as run:
        run.finish()
        expected = told(
            "SyntaxError: invalid syntax",
            exit_code=93,
            rank=0,
            host="node0",
            category="input",
            retryable=False,
            evidence="the only failure",
            kind="the script could not start",
        )
        catalogue.check(run, "syntax-error", expected)


def test_a_module_that_is_not_installed(catalogue: Catalogue) -> None:
    with catalogue.run("import no_such_module_here\n", nodes=1) as run:
        run.finish()
        expected = told(
            "ModuleNotFoundError: No module named 'no_such_module_here'",
            exit_code=93,
            rank=0,
            host="node0",
            category="input",
            retryable=False,
            evidence="the only failure",
            kind="the script could not start",
        )
        catalogue.check(run, "import-error", expected)


def test_endless_recursion(catalogue: Catalogue) -> None:
    script = f"""
    {MEET}
    def depth(tree):
        return 1 + depth(tree)

    if RANK == 1:
        depth(None)
    wait_for("never")
    """
    with catalogue.run(script) as run:
        run.finish()
        catalogue.check(run, "recursion-error", told("RecursionError: maximum recursion depth exceeded"))


def test_sys_exit(catalogue: Catalogue) -> None:
    script = f"""
    {MEET}
    if RANK == 1:
        print("no data for today", file=sys.stderr)
        sys.exit(3)
    wait_for("never")
    """
    with catalogue.run(script) as run:
        run.finish()
        expected = told("no data for today (exit code 3)", kind="ended itself with exit code 3")
        catalogue.check(run, "sys-exit", expected)


def test_os_exit(catalogue: Catalogue) -> None:
    script = f"""
    {MEET}
    if RANK == 1:
        os._exit(4)
    wait_for("never")
    """
    with catalogue.run(script) as run:
        run.finish()
        expected = told("Process failed with exitcode 4", kind="ended itself with exit code 4")
        catalogue.check(run, "os-exit", expected)


def test_unicode_control_characters_and_lone_surrogates(catalogue: Catalogue) -> None:
    """The message keeps its letters and loses what would steer a terminal or reverse its text."""
    script = MEET + (
        r"""
class Größe(Exception):
    pass

if RANK == 1:
    raise Größe("Datei '\u00fcbung\u2028\x1b[31m\u6570\u636e\x9b0m.\u202etxt' \U0001F4A5 \udcff\nfehlt")
wait_for("never")
"""
    )
    with catalogue.run(script) as run:
        run.finish()
        catalogue.check(run, "unicode", told("Größe: Datei 'übung\u2028数据0m.\u202etxt' 💥 \\udcff"))


def test_a_message_of_10_mb(catalogue: Catalogue) -> None:
    script = f"""
    {MEET}
    def check(tensor):
        raise ValueError("tensor has NaN: " + "0.123, " * 1_500_000)

    if RANK == 1:
        check(None)
    wait_for("never")
    """
    with catalogue.run(script) as run:
        run.finish()
        cause = catalogue.told(run).cause
        assert cause.startswith("ValueError: tensor has NaN: 0.123, 0.123,")
        assert len(cause) < 20_000
        catalogue.check(run, "message-of-10-mb", told(cause))


@pytest.mark.torch
def test_torchs_own_record(catalogue: Catalogue) -> None:
    """Its error file is read, and nothing is told twice."""
    pytest.importorskip("torch")
    script = """
    from torch.distributed.elastic.multiprocessing.errors import record

    def step():
        raise ValueError("loss is NaN at step 17")

    @record
    def main():
        tell("here")
        others_in_round()
        if RANK == 1:
            step()
        wait_for("never")

    main()
    """
    with catalogue.run(script) as run:
        run.finish()
        catalogue.check(run, "torch-record", told("ValueError: loss is NaN at step 17"))
        assert run.report()["verdict"]["failure"]["source"] == "error_file"
        assert run.attempt().report_text.read_text().count("Traceback (most recent call last)") == 1


def test_stderr_closed_before_the_failure(catalogue: Catalogue) -> None:
    script = f"""
    {MEET}
    if RANK == 1:
        os.close(2)
        raise ValueError("nobody hears this")
    wait_for("never")
    """
    with catalogue.run(script) as run:
        run.finish()
        expected = told("Process failed with exitcode 1", kind="ended itself with exit code 1")
        catalogue.check(run, "stderr-closed", expected)


def test_an_exception_and_then_a_hang_in_the_shutdown(catalogue: Catalogue) -> None:
    """A thread keeps the process alive after its traceback, and the others tell of a timeout. (Their words are
    written here: the real ones stand in the case of the collective.)"""
    script = f"""
    {MEET}
    import threading

    if RANK == 1:
        threading.Thread(target=wait_for, args=("never",)).start()
        raise ValueError("the batch has no labels")
    wait_for("the-timeout")
    raise RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation")
    """
    with catalogue.run(script) as run:
        run.until(lambda: "no labels" in run.log(), "rank 1's traceback")
        run.say("the-timeout")
        run.finish()
        expected = told(
            "ValueError: the batch has no labels",
            confidence="low",
            evidence="likely: it had printed this before this job ended it; "
            "the only failure that is not a consequence of another one; 1 other is a consequence",
            consequences={"a collective waited for a peer until its timeout": "0"},
        )
        catalogue.check(run, "exception-then-hang", expected)


def test_the_users_line_is_shown_where_a_librarys_frames_fill_the_report(catalogue: Catalogue) -> None:
    """Twenty frames of copy.py, as a compiler's of torch, and the line to look at above them."""
    script = f"""
    {MEET}
    import copy, threading

    def snapshot(state):
        return copy.deepcopy(state)

    state = [threading.Lock()]
    for _ in range(10):
        state = [state]
    if RANK == 1:
        snapshot(state)
    wait_for("never")
    """
    with catalogue.run(script) as run:
        run.finish()
        text = run.attempt().report_text.read_text()
        assert ", in snapshot (train.py:" in text.partition("TypeError: cannot pickle '_thread.lock' object")[2]
        assert "        return copy.deepcopy(state)\n" in text
        assert "lines of libraries (--all shows them)" in text
        assert len(text.splitlines()) <= 40
        frame = run.report()["verdict"]["user_frame"]
        assert (frame["function"], frame["file"].endswith("train.py")) == ("snapshot", True)

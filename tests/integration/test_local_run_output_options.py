"""What is shown of workers' output, how it looks and is rotated, in every amount and shape; and nobody reading it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

from hpc_elastic.options import job_options, worker_options
from hpc_elastic.run.log_pieces import find_pieces, piece_path
from hpc_elastic.run.option_values import Std, parse_local_ranks, parse_std_streams, shown_in_job_log
from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import ROOT, LocalRun
from tests.rigs.processes import resident_mb

WORKERS = 8

_SPEAKS = """
print("out", RANK)
print("err", RANK, file=sys.stderr)
"""

# As torchrun has it: rank and stream are on the console where they are not redirected, or are teed.
_TORCH = """
import json, sys, tempfile
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
found = []
for redirects, tee, only in json.loads(sys.argv[1]):
    specs = DefaultLogsSpecs(tempfile.mkdtemp(dir=sys.argv[2]), Std.from_str(redirects), Std.from_str(tee),
                             None if only is None else {int(rank) for rank in only.split(",")})
    dest = specs.reify({rank: {} for rank in range(8)})
    silent = set() if only is None else set(range(8)) - {int(rank) for rank in only.split(",")}
    found.append([
        [(dest.stdouts[rank] == "" and rank not in silent) or rank in dest.tee_stdouts,
         (dest.stderrs[rank] == "" and rank not in silent) or rank in dest.tee_stderrs]
        for rank in range(8)
    ])
print(json.dumps(found))
"""


def test_options_show_what_torchrun_shows(tmp_path: Path) -> None:
    words = ["0", "1", "2", "3", "0:3", "0:3,1:1", "7:2,3:1,0:0"]
    cases = [(r, t, only) for r in words for t in words for only in (None, "0", "1,3,7")]
    done = subprocess.run(
        [sys.executable, "-c", _TORCH, json.dumps(cases), str(tmp_path)],
        check=True,
        stdout=subprocess.PIPE,
        timeout=120,
    )
    for (redirects, tee, only), theirs in zip(cases, json.loads(done.stdout), strict=True):
        ours = []
        for rank in range(WORKERS):
            shown = shown_in_job_log(
                rank,
                rank,
                redirects=parse_std_streams(redirects, option="--redirects"),
                tee=parse_std_streams(tee, option="--tee"),
                only_local_ranks=None if only is None else parse_local_ranks(only),
            )
            ours.append([bool(shown & Std.OUT), bool(shown & Std.ERR)])
        assert ours == theirs, (redirects, tee, only)


def test_eight_workers_filtered_redirected_and_teed(tmp_path: Path) -> None:
    options = ["--redirects", "0:3,1:1,2:2,3:3", "--tee", "3:1,6:3", "--local-ranks-filter", "0,1,2,3,4"]
    with LocalRun(tmp_path, _SPEAKS, nodes=1, nproc=WORKERS, options=options) as run:
        assert run.finish() == ExitCode.OK
        said = {line for line in run.log().splitlines() if re.search(r"\] (out|err) \d\Z", line)}
        assert said == {"[node0:1] err 1", "[node0:2] out 2", "[node0:3] out 3", "[node0:4] out 4", "[node0:4] err 4"}
        for rank in range(WORKERS):
            assert run.rank(rank).stdout.read_text() == f"out {rank}\n"
            assert run.rank(rank).stderr.read_text() == f"err {rank}\n"


_DRAWS = r"""
bars = b"".join(b"\r\x1b[32mouter %3d%%\x1b[0m\n\r inner %3d\x1b[K\x1b[A" % (n, n) for n in range(300))
os.write(2, bars + b"\n\n")
os.write(1, b"\x1b[1;31mred without an end\nplain\n\x1b]0;title\x07titled\x1b[?25l\n")
for n in range(300):
    os.write(1, b"\r%3d%%|" % n + "█".encode() * (n // 10))
os.write(1, b"\n")
tell("drawn", raw=bars.decode())
os.write(1, "half a character: é".encode()[:-1])
wait_for("half")
os.write(1, "é\n".encode()[-1:] and b"\xa9 and its rest\n")
"""


def test_progress_bars_and_colours_of_eight_workers_stay_readable(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _DRAWS, nodes=1, nproc=WORKERS) as run:
        drawn = run.wait_moments("drawn", count=WORKERS)
        run.until(lambda: run.log().count("half a character: ") == WORKERS, "lines without an end")
        run.say("half")
        assert run.finish() == ExitCode.OK
        log = run.log_path.read_bytes()
        lines = [line for line in log.split(b"\n") if line.startswith(b"[node0:") and line[7:9].endswith(b"]")]
        assert b"\r" not in log
        assert b"\a" not in log
        # What is left of escapes are colours, and each ends with its line.
        assert not re.search(rb"\x1b(?!\[[0-9;]*m)", log)
        assert all(line.endswith(b"\x1b[0m") or line.rfind(b"\x1b[0m") >= line.rfind(b"\x1b[") for line in lines)
        for line in lines:
            line.decode("utf-8")  # no half character
        text = [line.decode() for line in lines]
        for rank in range(WORKERS):
            mine = [line.removeprefix(f"[node0:{rank}] ") for line in text if line.startswith(f"[node0:{rank}] ")]
            assert "\x1b[32mouter 299%\x1b[0m" in mine
            assert " inner 299" in mine
            assert [line for line in mine if line.startswith("299%|")] == ["299%|" + "█" * 29]
            assert {"plain", "titled", "\x1b[1;31mred without an end\x1b[0m"} <= set(mine)
            states = [line for line in mine if "outer" in line or "inner" in line]
            assert len(states) <= 8, "some states of the bars, not 600"
            assert run.rank(rank).stderr.read_bytes() == drawn[rank]["raw"].encode() + b"\n\n"


_FAILS = """
if RANK == 5:
    os.write(2, b"the first error, at the very start\\n" + b"-" * 28 + b"\\n")
    line = b"warning: " + b"w" * 54 + b"\\n"
    for _ in range(5):
        os.write(2, line * 1024)
    os.write(2, line * 1021)
    raise RuntimeError("boom at the end of a piece")
wait_for("never")
"""


def test_rotated_output_keeps_its_first_piece_and_the_traceback_is_found_over_two(tmp_path: Path) -> None:
    options = ["--log-max-size", "64K", "--log-max-files", "3", "--max-restarts", "0", "--redirects", "3"]
    with LocalRun(tmp_path, _FAILS, nodes=1, nproc=WORKERS, options=options) as run:
        assert run.finish() == ExitCode.WORKERS_FAILED
        path = run.rank(5).stderr
        pieces = find_pieces(path)
        assert len(pieces) == 2
        assert pieces[0] == 0
        assert piece_path(path, 0).read_text().startswith("the first error, at the very start\n")
        before, last = piece_path(path, pieces[1]).read_text(), path.read_text()
        assert "Traceback" in before
        assert "boom" not in before, "or this tests nothing"
        assert "boom" in last
        assert all(one.stat().st_size <= 64 << 10 for one in path.parent.glob("stderr.log*"))
        error = json.loads(run.rank(5).error_file.read_text())
        assert "Traceback (most recent call last)" in json.dumps(error)
        assert "RuntimeError: boom at the end of a piece" in run.attempt().report_text.read_text()
        assert "RuntimeError('boom" in json.dumps(error) or "RuntimeError: boom" in json.dumps(error)
        assert not run.rank(4).stderr.exists(), "a worker that is silent has no file"
        assert not find_pieces(run.rank(4).stderr)


_MUCH = """
line = b"loss 0.5 " * 11 + b"\\n"
for _ in range(20):
    os.write(1, line * 1000)
tell("printed")
wait_for("end")
"""


def test_a_job_log_that_is_not_read_until_the_run_is_over(tmp_path: Path) -> None:
    """srun is stuck, or somebody looks at the first page of it: the run goes on and comes to its end."""
    run = LocalRun(tmp_path, _MUCH, nodes=1, nproc=WORKERS)
    os.mkfifo(run.log_path)
    pipe = os.open(run.log_path, os.O_RDWR)
    read = bytearray()
    try:
        with run:
            run.log_path = tmp_path / "nothing.log"
            run.log_path.touch()
            run.wait_moments("printed", count=WORKERS)
            run.say("end")
            run.until(lambda: run.attempt().result_json.exists() and run.events("attempt_ended"), "end of the attempt")
            for rank in range(WORKERS):
                assert run.rank(rank).stdout.stat().st_size == 20 * 1000 * 100
            # All that is left is who waits for the reader of the report.
            reader = threading.Thread(target=_read_all, args=(pipe, read))
            reader.start()
            assert run.finish() == ExitCode.OK
            os.write(pipe, b"END")
            reader.join(10)
            (lost,) = run.events("output_lost")
            assert lost["reason"] == "the job log could not keep up"
            assert lost["not_in_files"] == 0
            assert lost["not_in_job_log"] == sum(one["not_in_job_log"] for one in lost["streams"])
            assert lost["not_in_job_log"] > 8_000_000
            assert {one["rank"] for one in lost["streams"]} == set(range(WORKERS))
            text = run.attempt().report_text.read_text()
            assert "bytes of the output of ranks 0-7 are not in the job log" in text
            assert b"bytes of the output of ranks 0-7 are not in the job log" in read
            assert run.report()["attempts"][0]["output_lost"][0]["not_in_job_log"] == lost["not_in_job_log"]
    finally:
        os.close(pipe)


def _read_all(pipe: int, into: bytearray) -> None:
    while not into.endswith(b"END"):
        into += os.read(pipe, 1 << 20)


def test_an_agent_used_from_python_rotates_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nfor _ in range(100): os.write(1, b'x' * 99 + b'\\n')\n")
    program = """
import sys
from pathlib import Path
from hpc_elastic.agent import LocalElasticAgent, WorkerSpec
from hpc_elastic.run.log_pieces import PieceLimit
from tests.integration.test_local_elastic_agent import handler_at

folder = Path(sys.argv[1])
spec = WorkerSpec("default", 1, str(folder / "train.py"), (), handler_at(folder / "rdzv"), max_restarts=0)
LocalElasticAgent(spec, log_dir=folder / "logs", redirects="3", log_limit=PieceLimit(size=3000, count=3)).run()
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60, env=env)
    pieces = sorted(path.name for path in (tmp_path / "logs").rglob("stdout.log*"))
    assert pieces == ["stdout.log", "stdout.log.000", "stdout.log.002"]


def test_lines_with_a_text_are_duplicated_into_a_file(tmp_path: Path) -> None:
    script = """
    for step in range(4):
        print("step", step, "loss", step / 2)
    print("a,b")
    print("nan in loss", file=sys.stderr)
    print("no such text", file=sys.stderr)
    """
    options = ("--duplicate-stdout-filters=loss 0,a,,b", "--duplicate_stderr_filters", "nan", "--redirects=1:2")
    with LocalRun(tmp_path, script, nodes=1, nproc=2, options=options) as run:
        assert run.finish() == 0
    for rank in (0, 1):
        prefix, folder = f"[node0:{rank}] ", run.rank(rank).root
        found = (folder / "filtered_stdout.log").read_text()
        assert found == "".join(f"{prefix}{line}\n" for line in ("step 0 loss 0.0", "step 1 loss 0.5", "a,b"))
    assert (run.rank(0).root / "filtered_stderr.log").read_text() == "[node0:0] nan in loss\n"
    assert not (run.rank(1).root / "filtered_stderr.log").exists(), "as torchrun: of what is shown"


_OPTIONS = "from torch.distributed.run import get_args_parser as p; print(*sorted(p()._option_string_actions))"


def test_no_option_of_torchrun_is_unknown() -> None:
    done = subprocess.run([sys.executable, "-c", _OPTIONS], check=True, capture_output=True, text=True, timeout=120)
    names = [name for name in done.stdout.split() if name not in ("-h", "--help")]
    assert "--duplicate-stdout-filters" in names
    options = {name: option for option in worker_options.OPTIONS for name in option.names}
    options |= {name: option for option in (*job_options.OPTIONS, *worker_options.UNNEEDED) for name in option.names}
    known = {*options, "-t"}  # -t is sbatch's time limit
    assert [name for name in names if name not in known and name.replace("_", "-") not in known] == []


AGENT_LIMIT_MB = 63.0

_ENDLESS_LINE = """
piece = b"y" * (1 << 20)
for _ in range(100):
    sys.stdout.buffer.write(piece)
sys.stdout.buffer.flush()
sys.stderr.write("a prompt without an end of line: ")
sys.stderr.flush()
tell("printed")
wait_for("end")
"""


def test_line_without_an_end(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _ENDLESS_LINE, nodes=1) as run:
        run.wait_moments("printed", count=1)
        # The unfinished line is shown while the worker still waits behind it.
        run.until(lambda: "[node0:0] a prompt without an end of line: " in run.log(), "unfinished line")
        assert resident_mb(run.agent(0).pid, peak=True) < AGENT_LIMIT_MB
        run.finish_well()
        assert run.rank(0).stdout.stat().st_size == 100 << 20
        assert run.rank(0).stderr.read_text() == "a prompt without an end of line: "
        run.rank(0).stdout.unlink()


def test_last_words_of_a_worker_that_dies(tmp_path: Path) -> None:
    script = """
    tell("here")
    others_in_round()
    if ROUND == 0 and RANK == 1:
        os.write(1, b"".join(b"step %d\\n" % step for step in range(20000)) + b"the very last")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with LocalRun(tmp_path, script) as run:
        assert run.finish() == ExitCode.OK
        text = run.rank(1).stdout.read_text()
        assert text.splitlines() == [*(f"step {step}" for step in range(20000)), "the very last"]
        assert "[node1:1] the very last" in run.log().splitlines()

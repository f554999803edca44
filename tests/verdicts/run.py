"""Runs the calibration catalogue and prints what the reports are worth.

::

    python -m tests.verdicts.run                             all cases
    python -m tests.verdicts.run --only exceptions           one group, or single cases (may be repeated)
    python -m tests.verdicts.run --jobs 2                    so many cases at a time
    python -m tests.verdicts.run --start-method forkserver   with workers that are forks
    python -m tests.verdicts.run --reports FOLDER            keep every report.txt there
    python -m tests.verdicts.run --results FILE              keep the results there; a run that was ended goes on
    python -m tests.verdicts.run --update-docs               write the table into docs/reference/known-failures.md
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.rigs.local_run import LocalRun, TookTooLong
from tests.verdicts.case import Case, all_cases
from tests.verdicts.judge import Grade, Judged, failed_to_run, judge

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "known-failures.md"
BEGIN, END = "<!-- verdicts: begin, written by python -m tests.verdicts.run --update-docs -->", "<!-- verdicts: end -->"
CONFIDENCES = ("high", "tie", "low", "none")
ENVIRON = {
    "OMP_NUM_THREADS": "1",  # a rank with a thread for each core would slow the others down
    "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",  # wrappers start this python3
}
"""Beside what is the machine's."""


def run_case(case: Case, *, start_method: str = "spawn") -> Judged:
    """Run one case in a folder of its own, of which nothing is left."""
    folder = Path(tempfile.mkdtemp(prefix="hpc-verdict-", dir="/tmp"))
    try:
        with _filesystems(case, folder):
            return _run_in(case, folder, start_method)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_in(case: Case, folder: Path, start_method: str) -> Judged:
    for name, text in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if text.startswith("#!") else 0o644)
    run = LocalRun(
        folder,
        case.script,
        prelude="",
        nodes=case.nodes,
        nproc=case.nproc,
        arguments=case.arguments,
        options=["--max-restarts", "0", "--shutdown-timeout", "5", *case.options],
        environ={**ENVIRON, **case.environ},
        interpreter=case.command,
        start_method=start_method,
    )
    judged: Judged | None = None
    try:
        with run:
            if case.act is not None:
                case.act(run)
            if (run.finish(within=case.seconds) == 0) is not case.succeeds:
                how = "failed" if case.succeeds else "succeeded"
                judged = failed_to_run(case, f"the run {how}", run.log())
            else:
                judged = judge(case, run.report(), run.attempt().report_text.read_text())
    except TookTooLong as error:
        return failed_to_run(case, str(error).splitlines()[0], run.log())
    except AssertionError:
        if judged is None:
            raise
        # What a script leaves behind is its own affair: `LocalRun` has ended what lived, the folder goes.
    except (OSError, KeyError) as error:
        return failed_to_run(case, f"no report can be read: {type(error).__name__}: {error}", run.log())
    return judged


@contextlib.contextmanager
def _filesystems(case: Case, folder: Path) -> Iterator[None]:
    """Mount what the case needs. Raises where nothing can be mounted here: a case is never left out silently."""
    mounted: list[Path] = []
    try:
        for name, size in case.tmpfs.items():
            path = folder / name
            path.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
            mounted.append(path)
        yield
    finally:
        for path in mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)


def run_all(
    cases: Sequence[Case],
    *,
    jobs: int,
    done: Callable[[Judged], None] = lambda judged: None,
    start_method: str = "spawn",
) -> list[Judged]:
    """Run cases, `jobs` at a time.

    Args:
        cases: The cases.
        jobs: Runs at a time.
        done: Called with each result, in the order of the cases.
        start_method: Of the workers.

    Returns:
        The results, in the order of the cases.
    """
    results = []
    with ThreadPoolExecutor(jobs) as pool:
        for judged in pool.map(functools.partial(run_case, start_method=start_method), cases):
            done(judged)
            results.append(judged)
    return results


def table(results: Sequence[Judged]) -> list[str]:
    """Right, honest and wrong by group (those that are all right in one row), then by confidence, in Markdown."""
    heads = ["class of failures", "cases", *(grade.value for grade in Grade), "wrong with `high`"]
    lines = [f"| {' | '.join(heads)} |", f"|---{'|---:' * (len(heads) - 1)}|"]
    groups = {
        name: [one for one in results if one.group == name] for name in dict.fromkeys(one.group for one in results)
    }
    flawless = [name for name, ones in groups.items() if all(one.grade is Grade.RIGHT for one in ones)]
    lines += [_row(name, ones) for name, ones in groups.items() if name not in flawless]
    lines.append(_row(f"{len(flawless)} other classes", [one for name in flawless for one in groups[name]]))
    lines.append(_row("**all**", results))
    heads = ["confidence", "cases", *(grade.value for grade in Grade)]
    lines += ["", f"| {' | '.join(heads)} |", f"|---{'|---:' * (len(heads) - 1)}|"]
    for confidence in CONFIDENCES:
        found = [one for one in results if one.confidence == confidence]
        lines.append(f"| {confidence} | {len(found)} | {' | '.join(map(str, _counts(found)))} |")
    return lines


def _row(name: str, results: Sequence[Judged]) -> str:
    return f"| {name} | {len(results)} | {' | '.join(map(str, _counts(results)))} | {len(high_and_wrong(results))} |"


def _counts(results: Sequence[Judged]) -> list[int]:
    counts = Counter(one.grade for one in results)
    return [counts[grade] for grade in Grade]


def high_and_wrong(results: Sequence[Judged]) -> list[Judged]:
    """What is wrong and was said to be certain."""
    return [one for one in results if one.grade is Grade.WRONG and one.confidence == "high"]


def complaints(results: Sequence[Judged]) -> list[str]:
    """A line for each result that is not right."""
    return [
        f"{one.grade.value:6} {one.confidence or '-':5} {one.name} ({one.group}): {one.why}; it says: {one.summary}"
        for one in results
        if one.grade is not Grade.RIGHT
    ]


def chosen(only: Sequence[str]) -> list[Case]:
    """The cases of these names or groups; of none given, all.

    Raises:
        SystemExit: A name that no case and no group has.
    """
    cases = all_cases()
    known = {name for case in cases for name in (case.name, case.group)}
    if unknown := [name for name in only if name not in known]:
        sys.exit(f"no case and no group is named {', '.join(unknown)}; groups: {', '.join(groups_of(cases))}")
    return [case for case in cases if not only or case.name in only or case.group in only]


def groups_of(cases: Sequence[Case]) -> list[str]:
    """Each group once, in order."""
    return list(dict.fromkeys(case.group for case in cases))


def read_results(path: Path) -> list[Judged]:
    """What `--results` has kept."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Judged(**{**values, "grade": Grade(values["grade"])}) for values in map(json.loads, lines)]


def write_table(results: Sequence[Judged]) -> None:
    """Replace the table in the page of known failures."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{PAGE}: the marks of the table are missing; run docs/generate.py")
    PAGE.write_text("\n".join([before + BEGIN, "", *table(results), "", END + after]), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.verdicts.run", description="See tests/verdicts/run.py.")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a case or a group; repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--start-method", default="spawn", choices=["spawn", "forkserver"], help="of the workers")
    parser.add_argument("--reports", type=Path, metavar="FOLDER", help="keep every report.txt there")
    parser.add_argument("--results", type=Path, metavar="FILE", help="cases whose results are there are not run again")
    parser.add_argument("--update-docs", action="store_true", help="write the table into the page of known failures")
    options = parser.parse_args(argv)
    if options.update_docs and options.only:
        parser.error("--update-docs: the table is about all cases")

    cases = chosen(options.only)
    known = {one.name: one for one in read_results(options.results)} if options.results else {}

    def done(judged: Judged) -> None:
        known[judged.name] = judged
        print(f"{judged.grade.value:6} {judged.confidence or '-':5} {judged.name}", flush=True)
        if options.results:
            with open(options.results, "a", encoding="utf-8") as file:
                file.write(json.dumps({**dataclasses.asdict(judged), "text": ""}) + "\n")
        if options.reports:
            options.reports.mkdir(parents=True, exist_ok=True)
            (options.reports / f"{judged.name}.txt").write_text(judged.text)

    # As Ctrl-C: no further case begins, and what the ones that run have started and mounted is cleared away.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    due = [case for case in cases if case.name not in known]
    run_all(due, jobs=options.jobs, done=done, start_method=options.start_method)
    results = [known[case.name] for case in cases]
    print("\n".join(["", *table(results), "", *complaints(results)]))
    if options.update_docs:
        write_table(results)
    return 0


if __name__ == "__main__":
    os.environ["HPC_ELASTIC_SITE_CONFIG"] = os.environ["HPC_ELASTIC_USER_CONFIG"] = ""
    sys.exit(main())

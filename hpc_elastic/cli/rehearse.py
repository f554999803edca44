"""``hpc-elastic rehearse``: does the script really go on where it was? Run undisturbed, and with faults."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from hpc_elastic.base.files import make_private_dir
from hpc_elastic.cli.config import read_command_line
from hpc_elastic.cli.main import print_note
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_directory import make_runs_dir
from hpc_elastic.options import job_options
from hpc_elastic.options.run_request import SlurmJob, build_spec, runs_directory, slurm_job, working_directory
from hpc_elastic.options.table import Group, Help, Parsed, define, explaining
from hpc_elastic.output.terminal import each_line
from hpc_elastic.rehearsal.journal import LossSource, parse_pattern
from hpc_elastic.rehearsal.judge import KINDS, QUICK, parse_kinds
from hpc_elastic.rehearsal.live_run import RehearsalOptions
from hpc_elastic.rehearsal.rehearse import Rehearsal, as_json, as_page, as_text
from hpc_elastic.run.spec import EntryKind, RunSpec

REHEARSE_HELP = Help(
    usage="hpc-elastic rehearse [options of submit] SCRIPT [script arguments...]",
    description="Runs the script small and undisturbed, then again with faults: kills, an exception, a notice; on "
    "this machine, or with --cluster slurm as jobs on the cluster. Reports whether it resumed, from which step, how "
    "long that took, and whether its losses are those of the undisturbed run. Exit code 0: all holds; 1: the script is "
    "guilty of something; 2: it can't be rehearsed, or a fault that --faults names was not done. "
    "Each run has a working directory of its own; {folder} in the "
    "script's arguments is that folder.",
    examples=(
        ("hpc-elastic rehearse --nodes 2 train.py --steps 40", "each fault once, on 2 nodes that this machine plays"),
        ("hpc-elastic rehearse --faults quick train.py --data /data/small", "the three faults that find most"),
        (
            "hpc-elastic rehearse --cluster slurm -p debug --nodes 2 --gpus-per-node 2 -t 30 train.py",
            "on 2 nodes of the cluster, in jobs of your own",
        ),
    ),
)


REHEARSE_OPTIONS = tuple(
    define(
        Group.SHOWN, f"--{name}", metavar=metavar, repeatable=text.endswith("repeatable"), in_files=False,
        help=text,
    )
    for name, metavar, text in (
        ("faults", "NAME,...|quick|all|list", "what is done to it (default: all that can be done); quick: kill-worker, "
         "kill-saving and notice, which find most; list shows them"),
        ("losses", "REGEX", "lines of the output that have a step and its loss, as two groups"),
        ("losses-file", "FILE", "the file in which the script writes them, in its working directory"),
        ("tolerance", "T", "relative difference of losses that does not count (default: 0.001)"),
        ("patience", "SECONDS", "without a step for so long, the script is stuck (default: 180)"),
        ("input", "PATH", "link it into the working directory of each run; repeatable"),
        ("watch", "DIR", "a folder elsewhere in which the script saves; repeatable"),
        ("json", None, "print one JSON object"),
    )
)  # fmt: skip
_MOST_NODES = _MOST_WORKERS = 2
"""Small: of each, unless fewer are asked for."""


def main_rehearse(argv: Sequence[str]) -> int:
    env = os.environ
    if list(argv) in (["--faults", "list"], ["--faults=list"]):
        lines = [f"{kind.name:<12}{kind.title}{f'; {kind.need.value}' if kind.need else ''}" for kind in KINDS]
        lines.append(f"{'quick':<12}{', '.join(kind.name for kind in QUICK)}: those that find most\n")
        sys.stdout.write(each_line("\n".join(lines)))
        return 0
    parsed = read_command_line(argv, subcommand="rehearse", help_=REHEARSE_HELP, env=env, own=REHEARSE_OPTIONS)
    if parsed is None:
        return 0
    with explaining(parsed):
        options = _options(parsed, env)
    quiet = parsed.flag("json")
    outcome = Rehearsal(options, report=lambda line: None if quiet else print_note(line)).run()
    (options.folder / "rehearsal.html").write_text(as_page(outcome))
    found = json.dumps(as_json(outcome), indent=2) + "\n"
    (options.folder / "rehearsal.json").write_text(found)
    if quiet:
        sys.stdout.write(found)
    else:
        sys.stdout.write(each_line(f"{as_text(outcome)}page: {options.folder / 'rehearsal.html'}\n"))
    return outcome.code


def _options(parsed: Parsed, env: Mapping[str, str]) -> RehearsalOptions:
    cwd = working_directory(parsed, env)
    pattern = parsed.get("losses")
    kinds = parse_kinds(parsed.get("faults") or "all")
    job, spec = _small(parsed, cwd, env)
    folder = runs_directory(parsed, cwd) / f"rehearsal-{time.strftime('%Y%m%d-%H%M%S')}-{spec.name}-{os.getpid()}"
    options = RehearsalOptions(
        spec=spec,
        folder=Path(os.path.abspath(folder)),
        kinds=kinds,
        tolerance=_number(parsed.get("tolerance") or "0.001", "--tolerance"),
        source=LossSource(
            pattern=None if pattern is None else parse_pattern(pattern),
            file=parsed.get("losses_file") or "",
            is_asked=pattern is not None or parsed.get("losses_file") is not None,
        ),
        patience=_number(parsed.get("patience") or "180", "--patience"),
        inputs=tuple(_there(cwd / path, "--input") for path in parsed.all("input")),
        watched=tuple(_there(cwd / path, "--watch") for path in parsed.all("watch")),
        env=env,
        job=job,
    )
    make_runs_dir(options.folder.parent)
    make_private_dir(options.folder, exist_ok=False)
    return options


def _number(text: str, option: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1
    if not 0 <= found < 1e9:
        raise UsageError(f"{option} {text}: give a number, 0 or more")
    return found


def _there(path: Path, option: str) -> Path:
    if not path.exists():
        raise UsageError(f"{option} {path}: not there")
    return path


def _small(parsed: Parsed, cwd: Path, env: Mapping[str, str]) -> tuple[SlurmJob | None, RunSpec]:
    least, most = job_options.asked_nodes(parsed)
    nodes = (min(least, _MOST_NODES), min(most, _MOST_NODES))
    grace = min(job_options.notice_seconds(parsed), 40) if parsed.get("grace") else 15
    small: dict[str, str] = {"nodes": "-".join(map(str, dict.fromkeys(nodes))), "grace": str(grace)}
    asked = parsed.get("nproc_per_node") or ""
    if asked.isdigit():
        small["nproc_per_node"] = str(min(int(asked), _MOST_WORKERS))
    if job_options.spare_nodes(parsed) > 1:
        small["spares"] = "1"
    reduced = replace(parsed, values={**parsed.values, **{dest: (value,) for dest, value in small.items()}})
    job: SlurmJob | None = None
    if job_options.asked_cluster(parsed) == "slurm":
        job = slurm_job(reduced, env, array="")
        spec = job.spec
    else:
        spec = build_spec(reduced, cluster="local", nodes=nodes, cwd=cwd, env=env, grace=grace)
        if not asked.isdigit():
            workers = spec.nproc_per_node if spec.nproc_per_node.isdigit() else "1"  # not given: GPUs, or one
            spec = replace(spec, nproc_per_node=str(min(int(workers), _MOST_WORKERS)))
    if most > _MOST_NODES or (asked.isdigit() and int(asked) > _MOST_WORKERS):
        print_note(f"small: {nodes[1]} nodes with {spec.nproc_per_node} workers each")
    entry = spec.entrypoint
    if entry.kind is EntryKind.SCRIPT:
        entry = replace(entry, target=str(cwd / entry.target))
    spec = replace(
        spec,
        entrypoint=entry,
        segment=1,
        max_restarts=10_000,
        max_requeues=10_000,
        requeue=True,
        shutdown_timeout=min(spec.shutdown_timeout, 5.0),
        array="",
    )
    return job, spec

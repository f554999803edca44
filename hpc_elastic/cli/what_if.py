"""``hpc-elastic what-if RUN|FILE``: what failures would cost a run with other nodes, spares or checkpoints."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import asdict, replace

from hpc_elastic.base.text import duration, plural
from hpc_elastic.cli.run_argument import find_run_dir
from hpc_elastic.errors import UsageError
from hpc_elastic.output.terminal import one_line
from hpc_elastic.report.simulation import PARTS, CostModel, Forecast, best_interval, expected_seconds, forecast

if TYPE_CHECKING:
    from hpc_elastic.report.measured_costs import MeasuredCosts

JSON_VERSION = 1
_RUNS = 200
_MOST_RUNS = 100_000
_MOST_SETTINGS = 64
_MOST_DIGITS = 9
_MOST_SECONDS = 1e15
_ABOVE_ZERO = ("nodes", "mtbf_node", "checkpoint_every", "work")
_ENOUGH_FAILURES = 5000
"""A training in which more are expected shows nothing more, and takes long to simulate."""
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_SEEN = "failures_seen"
"""The field of the model that no option gives."""
# Option → the model's field, what it is, and its help.
_OPTIONS: Mapping[str, tuple[str, str, str]] = {
    "nodes": ("nodes", "count", "nodes that the run uses"),
    "mtbf-node": ("mtbf_node", "time", "mean time between failures of one node, as in 30d"),
    "checkpoint-every": ("checkpoint_every", "time", "time of steps between two checkpoints"),
    "checkpoint-time": ("checkpoint_seconds", "time", "for how long a checkpoint keeps the steps waiting"),
    "restart-time": ("restart_seconds", "time", "from a failure to the next step, within the job"),
    "start-time": ("start_seconds", "time", "from a failure to the first step of the next job, without the queue"),
    "queue-time": ("queue_seconds", "time", "for how long a requeued job waits"),
    "spares": ("spares", "count", "spare nodes of a job"),
    "loses-node": ("loses_node", "share", "share of failures with which the node is lost, from 0 to 1"),
    "time-limit": ("time_limit", "time", "of one job"),
    "work": ("work", "time", "time of steps that the training takes (default: 7d, or that of 5000 failures)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="RUN|FILE",
        help="a run, whose failures, restarts, checkpoints and queue were measured, or a JSON file with a model",
    )
    parser.add_argument(
        "--runs-dir", metavar="DIR", help="folder of the runs (default: from the configuration, else ./runs)"
    )
    for name, (_, kind, text) in _OPTIONS.items():
        parser.add_argument(f"--{name}", metavar={"time": "TIME", "count": "N", "share": "SHARE"}[kind], help=text)
    parser.add_argument(
        "--compare", metavar="OPTION=V,V", action="append", default=[], help="each value in turn, as in spares=0,2,4"
    )
    parser.add_argument("--seed", metavar="N", default="0", help="of the random failures (default: 0)")
    parser.add_argument("--runs", metavar="N", default=str(_RUNS), help=f"simulated runs (default: {_RUNS})")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print. Returns 0.

    Raises:
        UsageError: a value makes no sense, or one is neither measured nor given.
    """
    given = {name: text for name in _OPTIONS if (text := getattr(args, name.replace("-", "_"))) is not None}
    seed, runs = _count("--seed", args.seed, least=0), _count("--runs", args.runs)
    if runs > _MOST_RUNS:
        raise UsageError(f"--runs {runs}: give at most {_MOST_RUNS}")
    settings = list(_settings(args.compare))
    for name in given.keys() & settings[0].keys():
        raise UsageError(f"--{name} {given[name]} and --compare {name}: give all its values to --compare")
    known = {**_known(args), **_changes(given)}
    forecasts = []
    for setting in settings:
        forecasts.append(forecast(_model({**known, **_changes(setting)}, args.source), seed=seed, runs=runs))
    if args.json:
        print(json.dumps(_document(settings, forecasts, seed=seed, runs=runs)))
    else:
        sys.stdout.write("\n".join(map(one_line, _lines(settings, forecasts, runs=runs, seed=seed))) + "\n")
    return 0


def _changes(given: Mapping[str, str]) -> dict[str, Any]:
    """Fields of the model by the options' texts."""
    found: dict[str, Any] = {_OPTIONS[name][0]: _value(name, text) for name, text in given.items()}
    return {**found, _SEEN: 0} if "mtbf_node" in found else found


def _known(args: argparse.Namespace) -> dict[str, Any]:
    """What the run measured, or the file states."""
    path = Path(args.source)
    if path.is_file():
        return _of_file(path)
    from hpc_elastic.report.collect import collect_run
    from hpc_elastic.report.goodput import goodput_of
    from hpc_elastic.report.measured_costs import measure_costs
    from hpc_elastic.run.paths import attempt_number

    folder = find_run_dir(args.source, args.runs_dir)
    history = collect_run(folder.parent if attempt_number(folder.name) is not None else folder)
    return _of_costs(measure_costs(history, goodput_of(history)))


def _of_costs(costs: MeasuredCosts) -> dict[str, Any]:
    restart = costs.restart_seconds
    if restart is None and costs.loses_node == 1:  # every failure requeued the job: no restart was needed
        restart = costs.start_seconds
    found = {
        "nodes": costs.nodes or None,
        "mtbf_node": costs.time_to_failure * costs.nodes if costs.time_to_failure is not None else None,
        _SEEN: costs.failures,
        "spares": costs.spares,
        "checkpoint_every": costs.checkpoint_every,
        "checkpoint_seconds": costs.checkpoint_seconds,
        "restart_seconds": restart,
        "start_seconds": costs.start_seconds,
        "queue_seconds": costs.queue_seconds,
        "loses_node": costs.loses_node,
    }
    return {name: value for name, value in found.items() if value is not None}


def _of_file(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path}: no JSON: {error}") from None
    if isinstance(found, dict) and isinstance(found.get("settings"), list) and found["settings"]:
        found = found["settings"][0]  # what --json printed
    model = found.get("model", found) if isinstance(found, dict) else None
    fields = {*(field for field, _, _ in _OPTIONS.values()), _SEEN}
    if not isinstance(model, dict) or not fields & model.keys():
        raise UsageError(f"{path}: no model; it has numbers of seconds by name: {', '.join(sorted(fields))}")
    return {name: value for name, value in model.items() if name in fields and value is not None}


def _model(known: Mapping[str, Any], source: str) -> CostModel:
    missing = [
        f"--{name}"
        for name, (field, _, _) in _OPTIONS.items()
        if field in ("mtbf_node", "checkpoint_every", "checkpoint_seconds", "restart_seconds") and field not in known
    ]
    if missing:
        raise UsageError(f"{source} does not show, or too rarely: give {', '.join(missing)}")
    try:
        model = msgspec.convert({**known, "nodes": known.get("nodes", 1)}, CostModel)
    except msgspec.ValidationError as error:
        raise UsageError(f"{source}: {error}") from None
    for name, value in asdict(model).items():
        if value is not None and not (0 < value < _MOST_SECONDS or (value == 0 and name not in _ABOVE_ZERO)):
            least = "above 0" if name in _ABOVE_ZERO else "from 0 on"
            raise UsageError(f"{source}: {name} is {value!s:.20}; it must be a number {least}, below {_MOST_SECONDS:g}")
    if "work" not in known:
        model = replace(model, work=min(model.work, max(_ENOUGH_FAILURES * model.mtbf, model.checkpoint_every)))
    if model.loses_node > 1:
        raise UsageError(f"{source}: loses_node is {model.loses_node:g}; it is a share, from 0 to 1")
    if model.time_limit is not None and model.time_limit <= model.start_seconds + model.checkpoint_seconds:
        raise UsageError(
            f"a job of {duration(model.time_limit)} has no time for a step: it starts for "
            f"{duration(model.start_seconds)} and saves for {duration(model.checkpoint_seconds)}"
        )
    return replace(model, checkpoint_every=min(model.checkpoint_every, model.work))


def _settings(compare: Sequence[str]) -> Iterator[dict[str, str]]:
    """Every combination of the values that are compared; without any, one that changes nothing."""
    names, values = [], []
    for text in compare:
        name, equals, given = text.partition("=")
        name = name.strip().removeprefix("--").replace("_", "-")
        found = [value.strip() for value in given.split(",") if value.strip()]
        if name not in _OPTIONS or not equals or not found:
            raise UsageError(f"--compare {text}: give an option with its values, as in spares=0,2,4")
        if name in names:
            raise UsageError(f"--compare {name} is given twice: give all its values at once")
        names.append(name)
        values.append(found)
    combined = list(itertools.islice(itertools.product(*values), _MOST_SETTINGS + 1))
    if len(combined) > _MOST_SETTINGS:
        raise UsageError(f"--compare: more than {_MOST_SETTINGS} combinations")
    for chosen in combined:
        yield dict(zip(names, chosen, strict=True))


def _value(name: str, text: str) -> float | int:
    _, kind, _ = _OPTIONS[name]
    if kind == "count":
        return _count(f"--{name}", text, least=0 if name == "spares" else 1)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS or (kind == "share" and (found[2] or float(found[1]) > 1)):
        how = "a number from 0 to 1" if kind == "share" else "a time, as in 90s, 30m, 12h, 30d"
        raise UsageError(f"--{name} {text}: give {how}")
    return float(found[1]) * _UNITS[found[2]]


def _count(option: str, text: str, *, least: int = 1) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:_MOST_DIGITS]) >= least):
        raise UsageError(f"{option} {text}: give a whole number from {least} on")
    if len(text) > _MOST_DIGITS:
        raise UsageError(f"{option} {text}: give a number of at most {_MOST_DIGITS} digits")
    return int(text)


def _lines(settings: Sequence[Mapping[str, str]], forecasts: Sequence[Forecast], *, runs: int, seed: int) -> list[str]:
    model = forecasts[0].model
    compared = {name for setting in settings for name in setting}
    seen = plural(model.failures_seen, "failure")
    by = f" by {seen} (each simulated run has another one that fits them)" if model.failures_seen else ""
    stated = [
        f"{name} {_shown(getattr(model, field), kind)}{by if field == 'mtbf_node' else ''}"
        for name, (field, kind, _) in _OPTIONS.items()
        if name not in compared and getattr(model, field) is not None
    ]
    names = [", ".join(f"{name} {value}" for name, value in setting.items()) or "as assumed" for setting in settings]
    width = max(map(len, names))
    head = f"{'':<{width}}  goodput  5 to 95 %        lost  checkpoints  restarts  start   queue  failures  requeues"
    lines = [f"assumed: {'; '.join(stated)}", f"{plural(runs, 'simulated run')} each, seed {seed}", head]
    for name, found in zip(names, forecasts, strict=True):
        if found.is_endless:
            lines.append(f"{name:<{width}}  never ends: failures come faster than steps are saved")
            continue
        mean = found.mean
        parts = [f"{100 * found.shares[name]:.1f} %" for name in PARTS[1:]]
        spread = f"{100 * found.low:.1f} to {100 * found.high:.1f}"
        lines.append(
            f"{name:<{width}}  {100 * found.goodput:5.1f} %  {spread:<13}  {parts[0]:>6}  {parts[1]:>11}  "
            f"{parts[2]:>8}  {parts[3]:>5}  {parts[4]:>5}  {mean.failures:>8}  {mean.requeues:>8}"
        )
    if "checkpoint-every" not in compared:
        best: dict[str, str] = {}  # text → the first setting that it holds for
        for name, found in zip(names, forecasts, strict=True):
            if text := _best_text(found.model):
                best.setdefault(text, name)
        lines += [f"{name}: {text}" if len(best) > 1 else text for text, name in best.items()]
    return lines


def _best_text(model: CostModel) -> str:
    """The interval that costs least; empty where a checkpoint costs nothing."""
    if model.checkpoint_seconds == 0:
        return ""
    times = f"T_fail {duration(model.mtbf, fine=True)}, T_save {duration(model.checkpoint_seconds, fine=True)}"
    if 2 * model.checkpoint_seconds > model.mtbf:
        return f"a checkpoint takes too long for any interval to help: {times}"
    return f"a checkpoint every {duration(best_interval(model))} would cost least, by √(2·T_fail·T_save) with {times}"


def _shown(value: float, kind: str) -> str:
    if kind == "count":
        return str(value)
    return f"{value:.3g}" if kind == "share" else duration(value) if value >= 10 else f"{value:.3g} s"


def _document(
    settings: Sequence[Mapping[str, str]], forecasts: Sequence[Forecast], *, seed: int, runs: int
) -> dict[str, Any]:
    return {
        "version": JSON_VERSION,
        "seed": seed,
        "runs": runs,
        "settings": [
            {
                "set": dict(setting),
                "model": msgspec.to_builtins(found.model),
                "goodput": found.goodput,
                "low": found.low,
                "high": found.high,
                "standard_error": found.error,
                "is_endless": found.is_endless,
                "wall": found.mean.wall,
                "parts": {name: getattr(found.mean, name) for name in PARTS},
                "shares": dict(found.shares),
                "failures": found.mean.failures,
                "requeues": found.mean.requeues,
                "best_checkpoint_every": best_interval(found.model),
                "expected_wall_without_queue": _finite(expected_seconds(found.model) + found.model.start_seconds),
            }
            for setting, found in zip(settings, forecasts, strict=True)
        ],
    }


def _finite(seconds: float) -> float | None:
    return seconds if seconds < float("inf") else None

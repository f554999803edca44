"""Measures rounds, and sends the figures: nowhere by default, or for Prometheus.

Names are ``workers.<role>.<what>``, as torch's agent has them: ``remaining_restarts``; a state in lower case, 1 at the
moment of its entering; ``rendezvous_seconds``, ``start_seconds``, ``stop_seconds``, ``restart_seconds``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from hpc_elastic.agent.supervision import WorkerState
from hpc_elastic.base.clock import Clock
from hpc_elastic.base.files import write_private
from hpc_elastic.run.option_values import MetricsTarget

logger = logging.getLogger(__name__)

Post = Callable[[Callable[[], object]], None]
_STATES = tuple(state.name.lower() for state in WorkerState)
_NAME = r"workers\.(?P<role>.+)\.(?P<what>[a-z_]+)\Z"


class MetricSink(Protocol):
    def put(self, name: str, value: float) -> None:
        """One figure, now. Never raises: a full disk must not end a run."""
        ...


class PrometheusMetrics:
    """The newest value of each figure, as the node exporter's textfile collector reads it.

    ``workers.default.remaining_restarts`` becomes ``hpc_elastic_workers_remaining_restarts{role="default"}``; of the
    states, the one that holds is 1. The file is replaced as a whole: a reader never sees half of it.
    """

    def __init__(self, path: Path, *, labels: Mapping[str, str] | None = None, post: Post | None = None) -> None:
        """Args:
        labels: Kept with every figure.
        post: Has the file written, for a caller that must not wait for a disk; without, `put` writes itself.
        """
        self._path = path
        self._labels = dict(labels or {})
        self._post = post or (lambda action: action())
        self._is_loss_logged = False
        self._text_due = ""
        self._values: dict[str, dict[str, float]] = {}

    def put(self, name: str, value: float) -> None:
        match = re.match(_NAME, name, re.DOTALL)
        if match is None:
            return
        role, what = match["role"], match["what"]
        if what in _STATES:
            states = {self._label_text(role=role, state=state): float(state == what) for state in _STATES}
            self._values.setdefault("state", {}).update(states)
        else:
            self._values.setdefault(what, {})[self._label_text(role=role)] = value
        has_been_posted = bool(self._text_due)
        self._text_due = self._text()
        if not has_been_posted:
            self._post(self._write)

    def _write(self) -> None:
        text, self._text_due = self._text_due, ""
        try:
            # The temporary file's name does not end in .prom, so the collector, another user, reads whole files only.
            write_private(self._path, text, mode=0o644)
        except OSError as error:
            if not self._is_loss_logged:  # once: a full disk must not fill the job log
                self._is_loss_logged = True
                logger.warning("--metrics: figures for %s are lost: %s", self._path, error)

    def _text(self) -> str:
        lines = []
        for what, values in sorted(self._values.items()):
            metric = f"hpc_elastic_workers_{what}"
            lines += [f"# TYPE {metric} gauge", *(f"{metric}{own} {value:g}" for own, value in sorted(values.items()))]
        return "\n".join(lines) + "\n"

    def _label_text(self, **more: str) -> str:
        def escaped(value: str) -> str:
            return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

        labels = {**self._labels, **more}
        return "{" + ",".join(f'{key}="{escaped(value)}"' for key, value in sorted(labels.items())) + "}"


def open_metrics(
    target: MetricsTarget | None, *, labels: Mapping[str, str], post: Post | None = None
) -> MetricSink | None:
    if target is None:
        return None
    return PrometheusMetrics(Path(target.path.replace("{host}", labels.get("host", ""))), labels=labels, post=post)


class RoundFigures:
    def __init__(self, sink: MetricSink | None, *, role: str, clock: Clock) -> None:
        self._sink = sink
        self._role = role
        self._clock = clock
        self._began: dict[str, float] = {}
        self._state: WorkerState | None = None

    def begin(self, what: str) -> None:
        self._began.setdefault(what, self._clock.monotonic())

    def end(self, what: str) -> float | None:
        began = self._began.pop(what, None)
        if began is None:
            return None
        seconds = round(self._clock.monotonic() - began, 3)
        self.put(f"{what}_seconds", seconds)
        return seconds

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        self.begin(what)
        yield
        self.end(what)

    def enter(self, state: WorkerState) -> None:
        if state is not self._state:
            self._state = state
            self.put(state.name.lower(), 1)

    def put(self, what: str, value: float) -> None:
        if self._sink is not None:
            self._sink.put(f"workers.{self._role}.{what}", value)

"""One node's side: what its workers continue from, and the way of their checkpoints to the shared filesystem.

Every step is over files alone and can be cut off anywhere: the next call, or the next agent, goes on from what is
there. The node with group rank 0 opens the folder of the checkpoint that is copied next; each node copies its part;
whoever sees all parts commits. No node writes more than its own files and two small records for a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base import codec
from hpc_elastic.base.clock import Clock
from hpc_elastic.base.files import ask_about, make_private_dir
from hpc_elastic.checkpoints.copying import CopyError, commit, copy_part, manifest_path
from hpc_elastic.checkpoints.decide import choose_start, next_target, removable_parts, removable_steps
from hpc_elastic.checkpoints.layout import (
    COPY,
    DIRTY,
    INDEX_NAME,
    REPLICA,
    TARGET,
    WHOLE,
    Choice,
    Manifest,
    NodePart,
    NodeReport,
    Saving,
    Start,
    bytes_in,
    committed_steps,
    files_of,
    finish_removals,
    last_committed,
    names_in,
    parts_in,
    read_index,
    remove,
    remove_dead_targets,
    remove_leftovers,
    shape_of,
    targets_in,
    walk,
)
from hpc_elastic.checkpoints.worker import settle
from hpc_elastic.run.agent_events import CheckpointChosen, CheckpointCommitted, CheckpointNotCommitted
from hpc_elastic.run.event_types import RunEvent

REPORT_SECONDS = 60.0
"""Longest wait for the others' reports; a node without one has nothing."""
FLUSH_SECONDS = 10.0
"""Least time for a checkpoint to be committed before the workers start; else as long as its steps took."""
ABANDON_SECONDS = 1800.0
DEAD_SECONDS = 2 * ABANDON_SECONDS
"""Age from which a half copied checkpoint of another run is dead: a run that lives gives up its own before."""
NEW_SECONDS = 5.0
"""Age up to which a whole part is kept where there is room: the leader may have just chosen it."""
CHOICE_NAME = "choice.json"


class NodePlace(Struct, frozen=True, kw_only=True):
    """This node in a round."""

    attempt: int
    round: int
    index: int
    uids: tuple[str, ...]
    """The agents' of all members, in the order of their group ranks."""
    ranks: int
    reports: Path


class NodeCheckpoints:
    """Used by one thread. Raises OSError only where the run's own records can't be written."""

    def __init__(
        self,
        *,
        local: Path,
        shared: Path,
        run_id: str,
        run_uid: str,
        keep: int,
        room: int,
        clock: Clock,
        write: Callable[[RunEvent], object],
        pace: Callable[[int], object] = lambda count: None,
        address: str = "",
        has_replicas: bool = False,
    ) -> None:
        self.local, self.shared = local, shared
        self._run_id, self._run_uid, self._keep, self._room = run_id, run_uid, keep, room
        self._clock, self._write, self._pace = clock, write, pace
        self._address, self._has_replicas = address, has_replicas
        self.place: NodePlace | None = None
        self.committed = -1
        """The newest committed step that is known; -1: none."""
        self._dead: set[Saving] = set()
        self._opened: dict[Saving, float] = {}
        self._whole_since: dict[Saving, float] = {}
        self._committed_at: float | None = None
        self._began_reporting: float | None = None
        self._flush: tuple[Saving, float] | None = None
        self._start_step = -1
        self._is_refused = self._is_below = False
        self.is_ending = self.has_target = False
        self._born = clock.monotonic()
        self.neighbour = ""
        """Address of the next node's agent; empty: none is known."""

    # -- the start of a round ------------------------------------------------------------------------------------

    def begin(self, place: NodePlace) -> None:
        """The round's members are known; its workers have not started, and the ones before are gone."""
        for part in parts_in(self.local, DIRTY):
            self._settle(part, self.place.ranks if self.place is not None else place.ranks)
            remove(self.local / part.name(DIRTY))
        remove_leftovers(self.local)
        self.place, self._flush, self._began_reporting = place, None, None
        self._dead.clear()  # a full disk may have room again
        self._is_refused = False
        make_private_dir(place.reports.parent)
        make_private_dir(place.reports)
        whole = tuple(parts_in(self.local, WHOLE))
        report = NodeReport(
            uid=place.uids[place.index],
            address=self._address,
            whole=whole,
            shapes=tuple(" ".join(shape_of(walk(files_of(part, WHOLE, self.local)))) for part in whole),
            copies=tuple(parts_in(self.local, COPY)),
        )
        codec.save(place.reports / f"node-{place.index:05d}.json", report)

    def _settle(self, part: NodePart, ranks: int) -> None:
        try:
            settle(self.local / part.name(DIRTY), self.local / part.name(WHOLE), ranks)
        except OSError:
            pass  # removed below

    def choose(self) -> Start | None:
        """Find out, or decide, what the workers continue from; None: ask again soon."""
        place = self.place
        assert place is not None
        ask_about(place.reports)
        names = set(os.listdir(place.reports))
        if CHOICE_NAME in names:
            choice = codec.load(place.reports / CHOICE_NAME, Choice)
            return self._start(choice) if isinstance(choice, Choice) else None
        if self._began_reporting is None:
            self._began_reporting = self._clock.monotonic()
        if place.index == 0:
            wanted = [f"node-{index:05d}.json" for index in range(len(place.uids))]
            waited = self._clock.monotonic() - self._began_reporting
            if waited < REPORT_SECONDS and not names.issuperset(wanted):
                return None
            found = [codec.load(place.reports / name, NodeReport) for name in wanted]
            reports = [one if isinstance(one, NodeReport) else NodeReport(uid="") for one in found]
            self._decide(reports)
        else:
            self.tick()
        return None

    def _decide(self, reports: list[NodeReport]) -> None:
        assert self.place is not None
        now, index = self._clock.monotonic(), last_committed(self.shared)
        self.committed = index.saving.step if index is not None else -1
        choice, better = choose_start(reports, index.saving if index is not None else None)
        if better is not None and better not in self._dead:
            if self._flush is None:
                lost = self._whole_since.get(better, now) - (self._committed_at or self._born)
                self._flush = better, now + max(FLUSH_SECONDS, lost)
                self._open(better)
            if now < self._flush[1] and not self._is_refused:
                self.tick()
                return
        finish_removals(self.shared)
        last = choice.saving.step if choice.saving is not None else -1
        for prefix, target in [(one, target) for one in (TARGET, REPLICA) for target in self._targets(one)]:
            held = {p.index for one in reports for p in (*one.whole, *one.copies) if p.saving == target}
            is_stale = target.step <= self.committed or target.step > last or held != set(range(target.count))
            if is_stale and target.attempt <= self.place.attempt:
                remove(self.shared / target.target(self._run_uid, prefix=prefix))
        codec.save(self.place.reports / CHOICE_NAME, choice)
        step = choice.saving.step if choice.saving is not None else None
        self._write(CheckpointChosen(round=self.place.round, step=step, is_local=not choice.is_committed))

    def _start(self, choice: Choice) -> Start:
        place, saving = self.place, choice.saving
        assert place is not None
        latest = []
        for part, state in parts_in(self.local, WHOLE, COPY).items():
            if saving is None or part.saving.step > saving.step:  # some node lacks it, and it is written again
                remove(self.local / part.name(state))
        if saving is not None:
            part = NodePart(saving, place.index)
            own = files_of(part, WHOLE, self.local)
            committed = self.shared / f"step-{saving.step}"
            if saving.count == len(place.uids) and part in parts_in(self.local, WHOLE):
                if choice.is_committed:
                    self._link_others(own, committed)
                latest.append(str(own))
            if choice.is_committed:
                ask_about(self.shared)
                latest.append(str(committed))
                self.committed = max(self.committed, saving.step)
        self._start_step = saving.step if saving is not None else -1
        start = Start(
            local=str(self.local),
            attempt=place.attempt,
            round=place.round,
            index=place.index,
            count=len(place.uids),
            ranks=place.ranks,
            room=self._room,
            latest=tuple(latest),
        )
        codec.save(self.start_path, start)
        if len(place.uids) > 1:
            after = (place.index + 1) % len(place.uids)
            report = codec.load(place.reports / f"node-{after:05d}.json", NodeReport)
            self.neighbour = report.address if isinstance(report, NodeReport) else ""
        return start

    @property
    def start_path(self) -> Path:
        """One file for each round: a worker reads it once."""
        assert self.place is not None
        return self.local / f"start-{self.place.attempt}-{self.place.round}.json"

    def _link_others(self, own: Path, committed: Path) -> None:
        """Show the other nodes' files in the node's own folder, unless each node has files of the same kinds."""
        index, names = read_index(self.shared, int(committed.name[5:])), set(walk(own))
        if index is None or shape_of(index.files) == sorted(shape_of(names) * index.saving.count):
            return
        for name in index.files.keys() - names:
            (own / name).parent.mkdir(parents=True, exist_ok=True)
            if not (own / name).is_symlink():
                os.symlink(committed / name, own / name)

    # -- in a round, and after it --------------------------------------------------------------------------------

    def tick(self, *, is_over: bool = False) -> bool:
        """Do what can be done now. Returns whether something is left. `is_over`: no worker writes any more."""
        if self.place is None:
            return False
        whole = list(parts_in(self.local, WHOLE))
        now = self._clock.monotonic()
        for part in whole:
            self._whole_since.setdefault(part.saving, now)
        targets: list[Saving] = []
        has_new = any(part.saving.step > self.committed for part in parts_in(self.local, WHOLE, COPY))
        try:
            if has_new:
                self._learn()
                targets = [saving for saving in self._targets(TARGET) if saving.step > self.committed]
            if self.place.index == 0:
                targets = self._lead(targets, whole)
            for target in targets:
                if target not in self._dead:
                    self._serve(target, whole, is_over)
            if has_new:
                self._learn()
            self._is_refused = False
        except OSError as error:
            if not self._is_refused:
                self._is_refused = True
                self._failed(None, error)
        self.has_target = bool(targets)
        self._prune(whole, [*targets, *(self._targets(REPLICA) if self._has_replicas and has_new else ())])
        if whole and whole[-1].saving.step < self.committed and not self._is_below:
            self._is_below = True
            self._failed(whole[-1].saving, f"a later one is in {self.shared}: continue from it, or give another folder")
        left = [part.saving for part in whole if part.saving.step > self.committed and part.saving not in self._dead]
        return bool(left)

    def finish(self) -> None:
        """The run ends, and the nodes' folders with it: what is not committed now never is."""
        if self.place is not None and self.place.index == 0:
            for prefix in (TARGET, REPLICA):
                for target in self._targets(prefix):
                    if target.attempt <= self.place.attempt:  # else a later attempt has taken the run over
                        remove(self.shared / target.target(self._run_uid, prefix=prefix))

    def report_left(self, why: str) -> None:
        """The run ends: say which checkpoint is lost with it."""
        found = [part.saving for part in parts_in(self.local, WHOLE) if part.saving.step > self.committed]
        if found and self.place is not None and self.place.index == 0:
            self._failed(found[-1], why)

    def _prune(self, whole: list[NodePart], targets: list[Saving]) -> None:
        now = self._clock.monotonic()
        is_settled = any(part > whole[-1] for part in parts_in(self.local, DIRTY)) if whole else False
        has_room = bool(whole) and bytes_in(self.local) < self._room / 2
        copies = parts_in(self.local, COPY)
        for part in copies:
            self._whole_since.setdefault(part.saving, now)
        present = {part.saving for part in (*whole, *copies)}
        self._whole_since = {saving: since for saving, since in self._whole_since.items() if saving in present}
        new = [saving for saving, since in self._whole_since.items() if has_room and now - since < NEW_SECONDS]
        kept = [*new, *targets]
        for part in removable_parts(whole, is_settled=is_settled, committed=self.committed, kept=kept):
            remove(self.local / part.name(WHOLE))
        for part in copies:
            if part.saving.step <= self.committed or part.saving not in kept:
                remove(self.local / part.name(COPY))

    def _targets(self, prefix: str) -> list[Saving]:
        return targets_in(self.shared, self._run_uid, prefix=prefix)

    def _learn(self) -> None:
        """Take in what other nodes have committed."""
        for step in committed_steps(self.shared):
            if step > self.committed and read_index(self.shared, step) is not None:
                self.committed, self._committed_at = step, self._clock.monotonic()

    def _open(self, saving: Saving) -> None:
        target = self.shared / saving.target(self._run_uid)
        (target / "files").mkdir(parents=True, exist_ok=True)
        (target / "parts").mkdir(exist_ok=True)

    def _lead(self, targets: list[Saving], whole: list[NodePart]) -> list[Saving]:
        now = self._clock.monotonic()
        for target in targets:
            folder = self.shared / target.target(self._run_uid)
            lacking = sorted(name for name in names_in(folder / "parts") if name.endswith(".without.json"))
            is_late = now - self._opened.setdefault(target, now) > ABANDON_SECONDS
            if lacking:
                found = codec.load(folder / "parts" / lacking[0], Manifest)
                self._give_up(
                    target, found.without if isinstance(found, Manifest) else "a node could not copy its part"
                )
            elif is_late:
                self._give_up(target, f"not all nodes had copied their part after {ABANDON_SECONDS:.0f} s")
        targets = [target for target in targets if (self.shared / target.target(self._run_uid)).exists()]
        if not targets:
            found_next = next_target(whole, committed=self.committed, dead=self._dead)
            if found_next is not None:
                self._open(found_next)
                self._opened[found_next] = now
                targets = [found_next]
        return targets

    def _give_up(self, target: Saving, why: str) -> None:
        self._dead.add(target)
        remove(self.shared / target.target(self._run_uid))
        self._failed(target, why)

    def _failed(self, target: Saving | None, why: object) -> None:
        last = self.committed if self.committed >= 0 else None
        self._write(CheckpointNotCommitted(step=target.step if target else None, last_step=last, reason=str(why)))

    def _serve(self, target: Saving, whole: list[NodePart], is_over: bool) -> None:
        """Copy what this node has to copy of a checkpoint, and commit it where all is there."""
        assert self.place is not None
        folder = self.shared / target.target(self._run_uid)
        parts = folder / "parts"
        ask_about(parts)
        if not parts.exists():
            return  # just opened, committed or given up
        for part, state in self._own_parts(target):
            if not manifest_path(folder, part.index).exists():
                self._copy(part, state, folder)
        if self._lacks(target, whole, is_over):
            self._report_lack(target, folder, self.place.index, "its workers did not complete it")
        names = [name for name in names_in(parts) if not name.startswith(".") and ".without" not in name]
        if len(names) < target.count:
            return
        try:
            index = commit(self.shared, folder, target, self._run_id)
        except (CopyError, OSError) as error:
            self._report_lack(target, folder, self.place.index, str(error))
            return
        if index is not None:
            size = sum(facts.size for facts in index.files.values())
            since = self._whole_since.get(target)
            seconds = None if since is None else round(self._clock.monotonic() - since, 3)
            self.committed, self._committed_at = target.step, self._clock.monotonic()
            self._write(CheckpointCommitted(step=target.step, size=size, seconds=seconds, at_end=self.is_ending))
            self._remove_old()

    def _own_parts(self, target: Saving) -> list[tuple[NodePart, str]]:
        assert self.place is not None
        found = []
        for part, state in parts_in(self.local, WHOLE, COPY).items():
            if part.saving != target:
                continue
            if state == WHOLE or self._owner_of(part) not in self.place.uids:
                found.append((part, state))
        return found

    def _owner_of(self, part: NodePart) -> str:
        try:
            return (self.local / part.name(COPY) / "owner").read_text()
        except OSError:
            return ""

    def _lacks(self, target: Saving, whole: list[NodePart], is_over: bool) -> bool:
        """This round's workers here will never complete it."""
        assert self.place is not None
        if (target.attempt, target.round) != (self.place.attempt, self.place.round):
            return False
        if any(part.saving == target for part in whole):
            return False
        part = NodePart(target, self.place.index)
        return is_over or (
            any(other.saving > target for other in whole) and not (self.local / part.name(DIRTY)).exists()
        )

    def _copy(self, part: NodePart, state: str, folder: Path) -> None:
        try:
            files = copy_part(files_of(part, state, self.local), folder / "files", tag=f"{part.index}", pace=self._pace)
            codec.save(manifest_path(folder, part.index), Manifest(files=files), durable=True)
        except OSError as error:
            if not folder.exists():
                return  # given up meanwhile
            self._report_lack(part.saving, folder, part.index, str(error))

    def _report_lack(self, target: Saving, folder: Path, index: int, why: str) -> None:
        assert self.place is not None
        if self.place.index == 0:
            self._give_up(target, why)
            return
        path = manifest_path(folder, index, without=True)
        try:
            codec.save(path, Manifest(without=why))
        except OSError:
            try:
                path.touch()  # on a full disk an empty file is still made
            except OSError:
                return  # both are tried again
        self._dead.add(target)

    def _remove_old(self) -> None:
        steps = [step for step in committed_steps(self.shared) if read_index(self.shared, step) is not None]
        for step in removable_steps(steps, keep=self._keep, protected=(self._start_step,)):
            remove(self.shared / f"step-{step}")
        now = os.stat(self.shared / f"step-{self.committed}" / INDEX_NAME).st_mtime
        remove_dead_targets(self.shared, self._run_uid, now=now, after=DEAD_SECONDS)

"""One node's side: what its workers continue from, and the way of their checkpoints to the shared filesystem.

Every step is over files alone and can be cut off anywhere: the next call, or the next agent, goes on from what is
there. The node with group rank 0 opens the folder of the checkpoint that is copied next; each node copies its part;
whoever sees all parts commits. No node writes more than its own files and two small records for a checkpoint. Which
checkpoint is next, what is removed, and what restarted workers continue from, are decided by pure functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

from hpc_elastic.base import codec
from hpc_elastic.base.clock import Clock
from hpc_elastic.base.files import ask_about, make_private_dir
from hpc_elastic.checkpoints import folders
from hpc_elastic.checkpoints.copying import CopyError, commit, copy_part, manifest_path
from hpc_elastic.checkpoints.folders import (
    COPY,
    DIRTY,
    REPLICA,
    TARGET,
    WHOLE,
    Choice,
    NodePart,
    NodePlace,
    NodeReport,
    Saving,
    settle,
)
from hpc_elastic.run.agent_events import CheckpointChosen, CheckpointCommitted, CheckpointNotCommitted
from hpc_elastic.run.events import RunEvent
from hpc_elastic.run.spec import RunSpec


def next_target(whole: Collection[NodePart], *, committed: int, dead: AbstractSet[Saving]) -> Saving | None:
    """`committed` is the newest committed step, -1 without one; `dead`: some node has not its part."""
    found = [part.saving for part in whole if part.saving.step > committed and part.saving not in dead]
    return max(found, default=None)


def removable_parts(
    whole: Collection[NodePart], *, is_settled: bool, committed: int, kept: Collection[Saving]
) -> list[NodePart]:
    """A rank enters a step's `checkpoint_dir` after all ranks have left the one before: the newest whole part is whole
    everywhere once a later one is begun (`is_settled`); until then the one before it is needed, too. `kept`: being
    copied, or so new that the leader may choose it next.
    """
    order = sorted(whole)
    needed = order[-1:] if is_settled or (order and order[-1].saving.step <= committed) else order[-2:]
    return [part for part in order if part not in needed and part.saving not in kept]


def removable_steps(steps: Collection[int], *, keep: int, protected: Collection[int]) -> list[int]:
    """Committed steps beyond the newest `keep`; never the newest one, nor one that workers may be reading."""
    return sorted(step for step in sorted(steps)[: -max(1, keep)] if step not in protected)


def choose_start(reports: Sequence[NodeReport], committed: Saving | None) -> tuple[Choice, Saving | None]:
    """Returns a newer checkpoint that could be committed first, too: all its parts are there, but a rank may have to
    read a file that another node has. `reports`: of all members, in the order of their group ranks.
    """
    fallback = Choice(saving=committed)
    known = {part.saving for report in reports for part in (*report.whole, *report.copies)}
    for saving in sorted(known, reverse=True):
        if committed is not None and saving.step <= committed.step:
            break
        held = {part.index for report in reports for part in (*report.whole, *report.copies) if part.saving == saving}
        if held != set(range(saving.count)):
            continue
        own = [
            dict(zip(report.whole, report.shapes, strict=False)).get(NodePart(saving, k))
            for k, report in enumerate(reports)
        ]
        if saving.count == len(reports) and own[0] and len(set(own)) == 1:
            return Choice(saving=saving, is_committed=False), None
        return fallback, saving
    return fallback, None


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


class NodeCheckpoints:
    """Used by one thread. Raises OSError only where the run's own records can't be written."""

    def __init__(
        self,
        *,
        spec: RunSpec,
        local: Path,
        reports: Path,
        room: int,
        clock: Clock,
        write: Callable[[RunEvent], object],
        pace: Callable[[int], object] = lambda count: None,
        address: str = "",
    ) -> None:
        """`reports` is the attempt's folder for what its nodes agree on; `address` is for the neighbour's part."""
        self.local, self.shared, self._reports = local, Path(spec.checkpoint_dir), reports
        self._spec, self._room, self._address = spec, room, address
        self._clock, self._write, self._pace = clock, write, pace
        self.place: NodePlace | None = None
        self.committed = -1
        """The newest committed step that is known; -1: none."""
        self._dead: set[Saving] = set()
        self._opened: dict[Saving, float] = {}
        self._whole_since: dict[Saving, float] = {}
        self._committed_at = self._began_at = clock.monotonic()
        self._flush: tuple[Saving, float] | None = None
        self._start_step = -1
        self._is_refused = self._is_below = False
        self.is_ending = self.has_target = False
        self.gone: Mapping[str, str] = {}
        """Uid → host of agents that were lost, once the run ends: their parts are their neighbours' to copy."""

    def begin(self, place: NodePlace) -> None:
        for part in folders.parts_in(self.local, DIRTY):
            with suppress(OSError):  # else it is removed
                ranks = self.place.ranks if self.place is not None else place.ranks
                settle(self.local / part.name(DIRTY), self.local / part.name(WHOLE), ranks)
            folders.remove(self.local / part.name(DIRTY))
        folders.remove_leftovers(self.local)
        self.place, self._flush, self._began_at = place, None, self._clock.monotonic()
        self._dead.clear()  # a full disk may have room again
        self._is_refused = False
        make_private_dir(self._reports)
        make_private_dir(self._round_reports)
        whole = tuple(folders.parts_in(self.local, WHOLE))
        report = folders.NodeReport(
            uid=place.uids[place.index],
            address=self._address,
            whole=whole,
            shapes=tuple(
                " ".join(folders.shape_of(folders.walk(folders.files_of(part, WHOLE, self.local)))) for part in whole
            ),
            copies=tuple(folders.parts_in(self.local, COPY)),
        )
        codec.save(self._report_path(place.index), report)

    def choose(self) -> folders.Start | None:
        """Find out, or decide, what the workers continue from; None: ask again soon."""
        place = self.place
        assert place is not None
        ask_about(self._round_reports)
        names = set(os.listdir(self._round_reports))
        if CHOICE_NAME in names:
            choice = codec.load(self._round_reports / CHOICE_NAME, folders.Choice)
            return self._start(choice) if isinstance(choice, folders.Choice) else None
        if place.index == 0:
            wanted = [self._report_path(index) for index in range(len(place.uids))]
            waited = self._clock.monotonic() - self._began_at
            if waited < REPORT_SECONDS and not names.issuperset(path.name for path in wanted):
                return None
            self._decide([self._report(index) for index in range(len(wanted))])
        else:
            self.tick()
        return None

    def _decide(self, reports: list[folders.NodeReport]) -> None:
        assert self.place is not None
        now, index = self._clock.monotonic(), folders.last_committed(self.shared)
        self.committed = index.saving.step if index is not None else -1
        choice, better = choose_start(reports, index.saving if index is not None else None)
        if better is not None and better not in self._dead:
            if self._flush is None:
                lost = self._whole_since.get(better, now) - self._committed_at
                self._flush = better, now + max(FLUSH_SECONDS, lost)
                self._open(better)
            if now < self._flush[1] and not self._is_refused:
                self.tick()
                return
        folders.finish_removals(self.shared)
        last = choice.saving.step if choice.saving is not None else -1
        for prefix, target in [(one, target) for one in (TARGET, REPLICA) for target in self._targets(one)]:
            held = {p.index for one in reports for p in (*one.whole, *one.copies) if p.saving == target}
            is_stale = target.step <= self.committed or target.step > last or held != set(range(target.count))
            if is_stale and target.attempt <= self.place.attempt:
                folders.remove(self.shared / target.target(self._spec.uid, prefix=prefix))
        codec.save(self._round_reports / CHOICE_NAME, choice)
        step = choice.saving.step if choice.saving is not None else None
        self._write(CheckpointChosen(round=self.place.round, step=step, is_local=not choice.is_committed))

    def _start(self, choice: folders.Choice) -> folders.Start:
        place, saving = self.place, choice.saving
        assert place is not None
        latest = []
        for part, state in folders.parts_in(self.local, WHOLE, COPY).items():
            if saving is None or part.saving.step > saving.step:  # some node lacks it, and it is written again
                folders.remove(self.local / part.name(state))
        if saving is not None:
            part = NodePart(saving, place.index)
            own = folders.files_of(part, WHOLE, self.local)
            committed = self.shared / f"step-{saving.step}"
            if saving.count == len(place.uids) and part in folders.parts_in(self.local, WHOLE):
                if choice.is_committed:
                    self._link_others(own, committed, saving.step)
                latest.append(str(own))
            if choice.is_committed:
                ask_about(self.shared)
                latest.append(str(committed))
                self.committed = max(self.committed, saving.step)
        self._start_step = saving.step if saving is not None else -1
        start = folders.Start(local=str(self.local), place=place, room=self._room, latest=tuple(latest))
        codec.save(self.start_path, start)
        return start

    def neighbour(self) -> str:
        place = self.place
        return self._report((place.index + 1) % len(place.uids)).address if place and len(place.uids) > 1 else ""

    @property
    def _leads(self) -> bool:
        place = self.place
        return place is not None and place.index == next(k for k, uid in enumerate(place.uids) if uid not in self.gone)

    @property
    def _round_reports(self) -> Path:
        assert self.place is not None
        return self._reports / f"round-{self.place.round:03d}"

    def _report_path(self, index: int) -> Path:
        return self._round_reports / f"node-{index:05d}.json"

    def _report(self, index: int) -> folders.NodeReport:
        found = codec.load(self._report_path(index), folders.NodeReport)
        return found if isinstance(found, folders.NodeReport) else folders.NodeReport(uid="")

    @property
    def start_path(self) -> Path:
        """One file for each round: a worker reads it once."""
        assert self.place is not None
        return self.local / f"start-{self.place.attempt}-{self.place.round}.json"

    def _link_others(self, own: Path, committed: Path, step: int) -> None:
        """Show the other nodes' files in the node's own folder, unless each node has files of the same kinds."""
        index, names = folders.read_index(self.shared, step), set(folders.walk(own))
        if index is None or folders.shape_of(index.files) == sorted(folders.shape_of(names) * index.saving.count):
            return
        for name in index.files.keys() - names:
            (own / name).parent.mkdir(parents=True, exist_ok=True)
            if not (own / name).is_symlink():
                os.symlink(committed / name, own / name)

    def tick(self, *, is_over: bool = False) -> bool:
        """Do what can be done now. Returns whether something is left. `is_over`: no worker writes any more."""
        if self.place is None:
            return False
        whole = list(folders.parts_in(self.local, WHOLE))
        now = self._clock.monotonic()
        for part in whole:
            self._whole_since.setdefault(part.saving, now)
        targets: list[Saving] = []
        has_new = any(part.saving.step > self.committed for part in folders.parts_in(self.local, WHOLE, COPY))
        try:
            if has_new:
                self._learn()
                targets = [saving for saving in self._targets(TARGET) if saving.step > self.committed]
            if self._leads:
                targets = self._lead(targets, whole)
            for target in targets:
                if target not in self._dead:
                    self._serve(target, whole, is_over)
            self._is_refused = False
        except OSError as error:
            if not self._is_refused:
                self._is_refused = True
                self._failed(None, error)
        self.has_target = bool(targets)
        self._prune(whole, [*targets, *(self._targets(REPLICA) if self._spec.checkpoint_replicas and has_new else ())])
        if whole and whole[-1].saving.step < self.committed and not self._is_below:
            self._is_below = True
            self._failed(whole[-1].saving, f"a later one is in {self.shared}: continue from it, or give another folder")
        left = [part.saving for part in whole if part.saving.step > self.committed and part.saving not in self._dead]
        return bool(left)

    def finish(self) -> None:
        """The run ends, and the nodes' folders with it: what is not committed now never is."""
        if self.place is not None and self._leads:
            for prefix in (TARGET, REPLICA):
                for target in self._targets(prefix):
                    if target.attempt <= self.place.attempt:  # else a later attempt has taken the run over
                        folders.remove(self.shared / target.target(self._spec.uid, prefix=prefix))
            folders.finish_removals(self.shared)  # what another node still wrote into as it was removed

    def report_left(self, why: str) -> None:
        with suppress(OSError):
            self._learn()
        found = [part.saving for part in folders.parts_in(self.local, WHOLE) if part.saving.step > self.committed]
        if found and self._leads:
            self._failed(found[-1], why)

    def _prune(self, whole: list[NodePart], targets: list[Saving]) -> None:
        now = self._clock.monotonic()
        is_settled = any(part > whole[-1] for part in folders.parts_in(self.local, DIRTY)) if whole else False
        has_room = bool(whole) and folders.bytes_in(self.local) < self._room / 2
        copies = folders.parts_in(self.local, COPY)
        for part in copies:
            self._whole_since.setdefault(part.saving, now)
        present = {part.saving for part in (*whole, *copies)}
        self._whole_since = {saving: since for saving, since in self._whole_since.items() if saving in present}
        new = [saving for saving, since in self._whole_since.items() if has_room and now - since < NEW_SECONDS]
        kept = [*new, *targets]
        for part in removable_parts(whole, is_settled=is_settled, committed=self.committed, kept=kept):
            folders.remove(self.local / part.name(WHOLE))
        for part in copies:
            if part.saving.step <= self.committed or part.saving not in kept:
                folders.remove(self.local / part.name(COPY))

    def _targets(self, prefix: str) -> list[Saving]:
        return folders.targets_in(self.shared, self._spec.uid, prefix=prefix)

    def _learn(self) -> None:
        for step in folders.committed_steps(self.shared):
            if step > self.committed and folders.read_index(self.shared, step) is not None:
                self.committed, self._committed_at = step, self._clock.monotonic()

    def _open(self, saving: Saving) -> None:
        target = self.shared / saving.target(self._spec.uid)
        (target / "files").mkdir(parents=True, exist_ok=True)
        (target / "parts").mkdir(exist_ok=True)

    def _lead(self, targets: list[Saving], whole: list[NodePart]) -> list[Saving]:
        now = self._clock.monotonic()
        for target in targets:
            folder = self.shared / target.target(self._spec.uid)
            lacking = sorted(name for name in folders.names_in(folder / "parts") if name.endswith(".without.json"))
            is_late = now - self._opened.setdefault(target, now) > ABANDON_SECONDS
            if lacking:
                found = codec.load(folder / "parts" / lacking[0], folders.Manifest)
                self._give_up(
                    target, found.without if isinstance(found, folders.Manifest) else "a node could not copy its part"
                )
            elif is_late:
                self._give_up(target, f"not all nodes had copied their part after {ABANDON_SECONDS:.0f} s")
        targets = [target for target in targets if (self.shared / target.target(self._spec.uid)).exists()]
        if not targets:
            found_next = next_target(whole, committed=self.committed, dead=self._dead)
            if found_next is not None:
                self._open(found_next)
                self._opened[found_next] = now
                targets = [found_next]
        return targets

    def _give_up(self, target: Saving, why: str) -> None:
        self._dead.add(target)
        folders.remove(self.shared / target.target(self._spec.uid))
        self._failed(target, why)

    def _failed(self, target: Saving | None, why: object) -> None:
        last = self.committed if self.committed >= 0 else None
        self._write(CheckpointNotCommitted(step=target.step if target else None, last_step=last, reason=str(why)))

    def _serve(self, target: Saving, whole: list[NodePart], is_over: bool) -> None:
        assert self.place is not None
        folder = self.shared / target.target(self._spec.uid)
        parts = folder / "parts"
        ask_about(parts)
        if not parts.exists():
            return  # just opened, committed or given up
        for part, state in folders.parts_in(self.local, WHOLE, COPY).items():
            is_mine = part.saving == target and (state == WHOLE or not self._has_live_owner(part))
            if is_mine and not manifest_path(folder, part.index).exists():
                self._copy(part, state, folder)
        if why := self._why_lacking(target, folder, whole, is_over):
            self._report_lack(target, folder, self.place.index, why)
        names = [name for name in folders.names_in(parts) if not name.startswith(".") and ".without" not in name]
        if len(names) < target.count:
            return
        try:
            index = commit(self.shared, folder, target, self._spec.run_id)
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

    def _has_live_owner(self, copy: NodePart) -> bool:
        assert self.place is not None
        try:
            owner = (self.local / copy.name(COPY) / "owner").read_text()
        except OSError:
            return False
        return owner in self.place.uids and owner not in self.gone

    def _why_lacking(self, target: Saving, folder: Path, whole: list[NodePart], is_over: bool) -> str:
        """Why a part that is this node's to copy will never be complete, or is lost; empty: it is not."""
        assert self.place is not None
        part, uids = self.place.part(target.step), self.place.uids
        if part.saving != target:
            return ""
        for k, uid in enumerate(uids):
            after = (k + 1) % len(uids)
            is_mine = after == part.index or uids[after] in self.gone
            if uid in self.gone and is_mine and not manifest_path(folder, k).exists():
                return f"a part was lost with its node ({self.gone[uid]})"
        if part in whole:
            return ""
        is_passed = any(other.saving > target for other in whole) and not (self.local / part.name(DIRTY)).exists()
        return "its workers did not complete it" if is_over or is_passed else ""

    def _copy(self, part: NodePart, state: str, folder: Path) -> None:
        try:
            files = copy_part(
                folders.files_of(part, state, self.local), folder / "files", tag=f"{part.index}", pace=self._pace
            )
            codec.save(manifest_path(folder, part.index), folders.Manifest(files=files), durable=True)
        except OSError as error:
            if not folder.exists():
                return  # given up meanwhile
            self._report_lack(part.saving, folder, part.index, str(error))

    def _report_lack(self, target: Saving, folder: Path, index: int, why: str) -> None:
        assert self.place is not None
        if self._leads:
            self._give_up(target, why)
            return
        path = manifest_path(folder, index, without=True)
        try:
            codec.save(path, folders.Manifest(without=why))
        except OSError:
            try:
                path.touch()  # on a full disk an empty file is still made
            except OSError:
                return  # both are tried again
        self._dead.add(target)

    def _remove_old(self) -> None:
        steps = [
            step for step in folders.committed_steps(self.shared) if folders.read_index(self.shared, step) is not None
        ]
        for step in removable_steps(steps, keep=self._spec.checkpoint_keep, protected=(self._start_step,)):
            folders.remove(self.shared / f"step-{step}")
        with suppress(OSError):  # one changes as it is looked at, so its run lives
            now = os.stat(self.shared / f"step-{self.committed}" / folders.INDEX_NAME).st_mtime
            folders.remove_dead_targets(self.shared, self._spec.uid, now=now, after=DEAD_SECONDS)

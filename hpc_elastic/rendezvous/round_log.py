"""The log as round records: what `store.record_log` keeps, with the member lists that records refer to."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

from hpc_elastic.rendezvous.state import RoundRecord, decode_record, members_elsewhere
from hpc_elastic.store.base import Store
from hpc_elastic.store.record_log import RecordLog


class RoundLog:
    """The log of one run, as one participant sees it."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._log = RecordLog(store)
        self._run_id = run_id
        self._newest: RoundRecord | None = None

    @property
    def went_back(self) -> bool:
        """Whether the last look showed less than one before: a wiped store, or a stale listing."""
        return self._log.went_back

    def latest(self, *, told: int = 0) -> RoundRecord | None:
        """The newest record that is visible; the same object while there is no newer one.

        Args:
            told: The number of a record that somebody says is there.

        Raises:
            OSError: a passing fault; also where the member list that a record refers to can't be read yet.
            RendezvousStateError: a record that this program can't read.
        """
        found = self._log.latest(told=told)
        if found is not None and (self._newest is None or found.number > self._newest.number):
            self._newest = self._decode(found.number, found.value)
        return self._newest

    def append(self, record: RoundRecord) -> bool:
        """Create `record`, the successor of the newest one. False: another has its number; read `latest`."""
        if not self._log.append(record.number, record.to_json()):
            return False
        self._newest = record
        return True

    def compact(self) -> None:
        """Remove old records, but for the one whose member list still holds. For the coordinator alone."""
        self._log.compact(keep=self._newest.members_at if self._newest is not None else 0)

    def _decode(self, number: int, value: Mapping[str, Any]) -> RoundRecord:
        at = members_elsewhere(value)
        known = self._newest
        if at and (known is None or at != (known.members_at or known.number)):
            there = self._log.read(at)
            if there is None:
                raise OSError(errno.EIO, f"record {at} of the log, which has the members, can't be read yet")
            known = decode_record(there.number, there.value, run_id=self._run_id)
        return decode_record(number, value, run_id=self._run_id, known=known)

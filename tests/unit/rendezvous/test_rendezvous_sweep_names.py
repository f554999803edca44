"""No name in the store ever stands for two things, whatever happens; and names that begin with a dot are nobody's."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from hpc_elastic.launch.run_directory import claim_attempt
from hpc_elastic.rendezvous.claims import SWEEP_SECONDS
from hpc_elastic.rendezvous.handler_config import HandlerConfig, RunFolder
from hpc_elastic.rendezvous.membership import KEPT_RECORDS
from hpc_elastic.rendezvous.state import NodeFailure
from hpc_elastic.run.paths import RunPaths, attempt_number, rank_index, round_index
from hpc_elastic.run.spec import RendezvousSettings
from tests.rigs.event_pairs import read_events
from tests.rigs.fake_clock import FakeClock
from tests.rigs.memory_store import MemoryStore
from tests.rigs.rendezvous_world import World

SETTINGS = RendezvousSettings(
    max_nodes=4, expected_nodes=4, timeout=100_000, last_call_timeout=5, heartbeat_interval=1, heartbeat_ttl=5
)


class Recording(MemoryStore):
    """Remembers every value that a key ever had, and how often it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[str] = Counter()
        self.meant: dict[str, set[str]] = {}

    def put_if_absent(self, key: str, value: str) -> bool:
        self.made[key] += self.get(key) is None
        taken = super().put_if_absent(key, value)
        self.meant.setdefault(key, set()).add(self.get(key) or "")
        return taken


@pytest.mark.parametrize("seed", range(6))
def test_no_name_is_used_twice_in_a_chaotic_run(seed: int) -> None:
    rng = random.Random(seed)
    world = World(SETTINGS, beats=seed % 2 == 0)
    world.store = store = Recording()
    for index in range(4):
        world.start(index)
    for _ in range(40):
        world.run(lambda: False, seconds=rng.uniform(0.5, SWEEP_SECONDS / 2), tick=rng.choice([0.25, 1.0]), rng=rng)
        node, event = rng.choice(world.nodes), rng.random()
        if event < 0.3 and node.alive:
            node.crash_after = node.effects + rng.randint(0, 3)
        elif event < 0.5 and node.alive:
            node.frozen = not node.frozen
        elif event < 0.8 and node.running_round is not None and node.alive and not node.frozen:
            failure = NodeFailure(node=node.index, fingerprint="E", failure_class="root", retryable=True, message="E")
            node.participant.claims.report_failure(node.running_round, failure)
        else:
            gone = [n for n in range(4) if not any(o.alive and o.index == n for o in world.nodes)]
            if gone:
                world.start(rng.choice(gone))
    assert len(store.made) > 60, "the run is too quiet to say anything"
    newest = max(int(name) for name in store.list("log"))
    for key, values in store.meant.items():
        folder, _, name = key.partition("/")
        if folder == "log" and int(name) <= newest - KEPT_RECORDS:
            continue  # compacted away: whoever takes such a number up again learns at once that it is behind
        assert len(values) == 1, f"{key} was given {values}"
        assert store.made[key] == 1 or folder == "node", f"{key} was made {store.made[key]} times"
    uids = [name.partition("+")[0] for name in (key.partition("/")[2] for key in store.made if key[:5] == "node/")]
    assert len(uids) == len(set(uids))
    assert set(uids) <= {node.info.uid for node in world.nodes}


DOT_NAMES = (".nfs000000000000000100000001", ".0123456789abcdef", ".hidden.jsonl")


def test_listings_of_a_run_directory_pass_over_dot_names(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    paths = RunPaths(tmp_path)
    attempt = claim_attempt(paths)
    for folder in (tmp_path, attempt.root, attempt.events):
        for name in (*DOT_NAMES, ".attempt-007", ".round-007", ".rank-00007"):
            (folder / name).write_text('{"event": "garbage"}\n')
    assert claim_attempt(paths).number == 1
    assert list(read_events(attempt.events)) == []
    assert attempt_number(".attempt-007") is None
    assert round_index(".round-007") is None
    assert rank_index(".rank-00007") is None
    folder = RunFolder(HandlerConfig(directory=str(tmp_path), run_id="x", min_nodes=1, max_nodes=1), FakeClock())
    folder.enter(1)
    for name in (*DOT_NAMES, ".epoch-000009"):
        (Path(folder.path) / name).write_text("garbage")
    assert folder.current_epoch() == 1

"""The text of a script: the lock-step trainer with `hpc_elastic.checkpoint_dir`."""

from __future__ import annotations

from pathlib import Path

from tests.rigs import lockstep

_MAIN = """
import sys
import hpc_elastic

EACH = {each}  # every rank writes a file of its own, or rank 0 one for all
PAD = "x" * {pad}


def name():
    return f"rank{{RANK if EACH else 0}}.json"


def save(step, state):
    began = time.monotonic()
    with hpc_elastic.checkpoint_dir(step) as folder:
        assert not (EACH and list(folder.glob(name()))), "an empty folder"
        if EACH or RANK == 0:
            (folder / name()).write_text(json.dumps([step, state, PAD]))
    print(f"saved {{step}} in {{time.monotonic() - began:.3f}} s", flush=True)


def main():
    peers = connect(120.0)
    found = hpc_elastic.latest_checkpoint()
    step, state = json.loads((found / name()).read_text())[:2] if found else (0, 1)
    sums = all_reduce(peers, step, state)
    assert tuple(sums) == (WORLD_SIZE * step, WORLD_SIZE * state % PRIME), "all ranks have the same"
    place = "nothing" if found is None else "its node" if "/hpc-elastic-checkpoints." in str(found) else "shared"
    print(f"rank {{RANK}} of {{WORLD_SIZE}} begins at step {{step}} from {{place}}", flush=True)
    is_last, notice = step >= {steps}, False
    while not is_last:
        ends = RANK == 0 and (step + 1 >= {steps} or os.path.exists("end"))
        gradients, is_last = all_reduce(peers, gradient(state, step, RANK, WORLD_SIZE), ends)
        step, state = step + 1, update(state, gradients)
        hpc_elastic.heartbeat(step)
        print(f"step {{step}} at {{time.time():.3f}}", flush=True)
        notice = hpc_elastic.should_checkpoint(step)
        if is_last or notice or step % {every} == 0:
            save(step, state)
        if notice:
            sys.exit(0)
        time.sleep({step_seconds})
    print(f"final: step={{step}} state={{state}}", flush=True)


main()
"""


def trainer(
    *, each: bool = True, steps: int = 1 << 40, every: int = 5, step_seconds: float = 0.05, pad: int = 0
) -> str:
    """`pad`: bytes that each file is longer."""
    source = Path(lockstep.__file__).read_text().partition('if __name__ == "__main__":')[0]
    return source + _MAIN.format(each=each, steps=steps, every=every, step_seconds=step_seconds, pad=pad)

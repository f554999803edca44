"""The worker that is measured: prints its first line, forms a process group if asked to, and waits for the end.

Argument: ``plain``, ``torch`` or ``train`` (torch, and three DDP steps); it ends when the file ``stop`` is in the
stamps' folder. Each moment is a line in a file of its own: nothing is shared between workers.
"""

import json
import os
import sys
import time

FOLDER = os.environ["BENCH_STAMPS"]


def stamp(moment: str, **facts: object) -> None:
    """Append one moment to this process' file, by the wall clock of this host."""
    line = {"moment": moment, "t": time.time_ns(), "pid": os.getpid(), "rank": int(os.environ["RANK"]), **facts}
    fd = os.open(os.path.join(FOLDER, f"{os.getpid()}.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, (json.dumps(line) + "\n").encode())
    os.close(fd)


def main() -> None:
    kind = sys.argv[1]
    print(f"first line of rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
    stamp("line")
    if kind in ("torch", "train"):
        import torch
        import torch.distributed as dist

        stamp("imported")
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        if int(total.item()) != int(os.environ["WORLD_SIZE"]):
            raise RuntimeError(f"the process group counts {total.item()}")
        stamp("group")
    if kind == "train":
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(1, 4):
            optimizer.zero_grad()
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            stamp(f"step {step}")
    while not os.path.exists(os.path.join(FOLDER, "stop")):
        time.sleep(0.02)


main()

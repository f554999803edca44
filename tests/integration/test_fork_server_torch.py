"""torch in workers that are forks: what it starts, compiles and seeds works as in a fresh interpreter."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.rigs.start_methods import Starter, finish

pytestmark = pytest.mark.torch

TRAIN = """
import os, threading
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, n): return torch.tensor([float(n)] * 4), os.getppid()

if __name__ == "__main__":
    drawn = torch.initial_seed(), torch.rand(1).item()
    torch.manual_seed(7)
    print("seeded", torch.rand(1).item(), torch.get_num_threads(), torch.cuda.is_available())
    print("threads at first", threading.active_count())
    print("parallel", (torch.ones(300, 300) @ torch.ones(300, 300)).sum().item())
    print("vector", torch.sigmoid(torch.zeros(100000)).sum().item())
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/{os.getpid()}", rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for method in ("fork", "spawn"):
        for batch, parents in DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context=method):
            assert set(parents.tolist()) == {os.getpid()}
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    print("loss", round(model(torch.ones(1, 4)).sum().item(), 5))
    compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")
    print("compiled", compiled(torch.ones(2)).tolist())
    dist.destroy_process_group()
    print("drawn", *drawn)
"""


def test_training_with_torch_gives_the_same_in_both(tmp_path: Path) -> None:
    with Starter(tmp_path, script=TRAIN, preload=("torch", "torch._dynamo")) as starter:
        starter.ready()
        assert not starter.server.preload.left_out
        fresh, forked = starter.both(GLOO_SOCKET_IFNAME="lo")
    assert forked.status.exitcode == fresh.status.exitcode == 0, forked.stderr
    (same, drawn), (one, own) = (seen.stdout.split("drawn ") for seen in (forked, fresh))
    assert "compiled [3.0, 3.0]" in same
    assert one == same
    assert own != drawn, "each has a seed of its own"


COMPILES = """
import os, sys
warm = "torch._inductor.compile_fx" in sys.modules
import torch

if __name__ == "__main__":
    compiled = torch.compile(lambda x: torch.sigmoid(x) * 2 + x.sum())
    print("value", compiled(torch.linspace(0, 1, 32)).sum().item())
    print("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"])
    built = [name for _, _, names in os.walk(os.environ["TORCHINDUCTOR_CACHE_DIR"]) for name in names]
    print("built", any(name.endswith(".so") for name in built))
    print("warm", warm)
"""


@pytest.mark.slow
def test_what_inductor_compiles_is_the_same_in_both(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COMPILES)
    preload = ("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.codecache")
    cache = tmp_path / "cache"
    with Starter(tmp_path, preload=preload, environ={"TORCHINDUCTOR_CACHE_DIR": str(cache)}) as starter:
        starter.ready()
        assert not starter.server.preload.left_out
        forked = finish(starter.fork())
        shutil.rmtree(cache)  # each builds by itself
        fresh = finish(starter.spawn())
    assert forked.status.exitcode == fresh.status.exitcode == 0, forked.stderr
    (told, warm), (as_ever, cold) = (seen.stdout.split("warm ") for seen in (forked, fresh))
    assert (told, warm, cold) == (as_ever, "True\n", "False\n")
    assert "built True" in told
    assert forked.stderr == fresh.stderr

"""A small network in a loop of its own with accelerate, and our callback."""

import sys
import time

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torn import is_first, kill, say

from hpc_elastic.integrations.accelerate import ElasticCallback


def tear(models, weights, folder):
    """Half of the second checkpoint is there when its writer is killed."""
    if "/step-20." in folder and is_first():
        torch.save(weights[0], f"{folder}/pytorch_model.bin")
        kill()


def main():
    folder, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    accelerator.register_save_state_pre_hook(tear)
    elastic = ElasticCallback(accelerator, folder, total=steps)
    done = elastic.resume()
    say(f"resuming after step {done}")
    for step in range(done + 1, steps + 1):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(2 * step + accelerator.process_index))
        loss = F.mse_loss(model(x), x.sin().sum(1, keepdim=True))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        say(f"step {step}: loss={loss.item():.4f}")
        time.sleep(0.05)
        if elastic.on_step_end(step, loss=loss.item(), save=step % 10 == 0):
            return
    say(f"final: step={steps} ranks={accelerator.num_processes}")


main()

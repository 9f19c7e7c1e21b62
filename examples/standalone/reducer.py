"""The gradient reducer, with nothing else of epl: torchrun --nproc_per_node 2 reducer.py

The script divides the data, starts the process group and writes the loop; the reducer keeps gradients equal.
"""

import torch
import torch.distributed as dist
from torch import nn

from epl.parallel import GradientReducer, ReducePolicy, copy_from_first

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
assert dist.group.WORLD is not None

torch.manual_seed(rank)  # each rank starts with weights of its own ...
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
copy_from_first(model.parameters(), dist.group.WORLD)  # ... and takes rank 0's
reducer = GradientReducer(model, dist.group.WORLD, policy=ReducePolicy(method="mean"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

x = torch.linspace(-1, 1, 64 * 8, dtype=torch.float64).view(64, 8)
y = x.sin().sum(dim=1, keepdim=True)
own = slice(rank * 64 // world_size, (rank + 1) * 64 // world_size)
for _ in range(20):
    optimizer.zero_grad()
    (x1, x2), (y1, y2) = x[own].chunk(2), y[own].chunk(2)
    with reducer.no_sync():  # two backward passes, one reduction
        (nn.functional.mse_loss(model(x1), y1) / 2).backward()
    (nn.functional.mse_loss(model(x2), y2) / 2).backward()
    optimizer.step()

with torch.no_grad():
    loss = nn.functional.mse_loss(model(x), y)
print(f"rank {rank}: loss on all rows {loss.item():.12f}")
reducer.close()
dist.destroy_process_group()

"""Clipping by the norm over all ranks, with nothing else of epl: torchrun --nproc_per_node 2 clipping.py

Each rank holds other parameters (here: some outputs of one wide layer, as under tensor parallelism), so torch's own
`clip_grad_norm_` would clip each part by its own norm and bend the gradient.
"""

import torch
import torch.distributed as dist
from torch import nn

import epl

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
assert dist.group.WORLD is not None

torch.manual_seed(0)
whole = nn.Linear(16, 8 * world_size, bias=False).double()
x, y = torch.randn(32, 16, dtype=torch.float64), 10 * torch.randn(32, 8 * world_size, dtype=torch.float64)

own = slice(8 * rank, 8 * (rank + 1))
part = nn.Linear(16, 8, bias=False).double()
part.load_state_dict({"weight": whole.weight[own]})
((part(x) - y[:, own]) ** 2).sum().backward()
norm = epl.clip_grad_norm_(part.parameters(), 1.0, groups=[dist.group.WORLD])

# What one process with the whole layer does:
((whole(x) - y) ** 2).sum().backward()
expected = nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
assert part.weight.grad is not None
assert whole.weight.grad is not None
same = torch.allclose(part.weight.grad, whole.weight.grad[own])
print(f"rank {rank}: norm {norm.item():.6f}, of one process {expected.item():.6f}; the same gradient: {same}")
dist.destroy_process_group()

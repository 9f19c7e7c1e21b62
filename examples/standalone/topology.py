"""Named process groups, with nothing else of epl: torchrun --nproc_per_node 4 topology.py"""

import torch
import torch.distributed as dist

import epl
from epl.cluster.selftest import check_communication

dist.init_process_group("gloo")  # the script's own; epl adopts it
rank, world_size = dist.get_rank(), dist.get_world_size()

# Outermost first: ranks of the last axis are neighbours, so put the axis that talks most there.
topology = epl.setup_process_groups([("pipe", 2), ("data", world_size / 2)])
report = check_communication(topology)  # raises on every rank if any group is broken
if rank == 0:
    print(topology.dump())
    print(report)

# The groups are torch's own, for torch's own calls.
total = torch.tensor(float(rank))
dist.all_reduce(total, group=topology.group("data"))
batch = topology.broadcast_in_model_group({"x": torch.full((2,), float(rank))} if topology.is_first("model") else None)
print(
    f"rank {rank}: stage {topology.rank('pipe')} of {topology.size('pipe')}, next stage on rank "
    f"{topology.next_rank('pipe')}, sum over data {total.item():g}, batch from rank {batch['x'][0]:g}"
)
dist.destroy_process_group()

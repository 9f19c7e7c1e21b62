"""Imported once by the fork server; every rank is forked from it and starts with torch in memory (0.05 s instead of 3)."""

import torch
import torch.distributed
import torch.distributed.device_mesh
import torch.utils.data

torch.set_num_threads(1)  # forked ranks share two cores; more threads per rank only fight each other

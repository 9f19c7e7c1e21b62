"""Imported once by the fork server; every rank is forked from it and starts with torch and epl in memory (0.05 s, not 3)."""

import numpy
import pytest
import torch
import torch.distributed
import torch.distributed.device_mesh
import torch.utils.checkpoint
import torch.utils.data

import epl

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # the first optimizer imports the compiler: 1.4 s
torch.set_num_threads(1)  # forked ranks share two cores; more threads per rank only fight each other
__all__ = ["epl", "numpy", "pytest", "torch"]

"""A part larger than a rank's memory: built, filled and cut under a hard limit, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

WIDTH, ROOM = 256, 64 << 20

PROGRAM = """
import resource, sys
import torch
from torch import nn
import epl
from epl.graph import registry
from epl.graph.deferred import is_deferred, settle_block
from epl.plan.split.cut import Cut
from epl.plan.split.layout import ParameterLayout

classes, width, room, dim = map(int, sys.argv[1:])


def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) << 10


torch.set_num_threads(1)
registry.devices = 4
with epl.split(4):  # what torch imports and allocates once
    nn.init.normal_(nn.Linear(256, 20_000).weight)
block = classes * width                       # a quarter of float32
resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + block + room,) * 2)
before = status("VmRSS")

torch.manual_seed(3)
with epl.split(4):
    head = nn.Linear(width, classes, bias=False)
nn.init.normal_(head.weight, std=0.02)
after = torch.rand(3)
assert is_deferred(head.weight)
layout = ParameterLayout(head.weight.shape, dim, Cut.even("x", head.weight.shape[dim], 4))
settle_block(head.weight, layout, 1)
grown = status("VmHWM") - before
assert grown <= block + room, f"{grown >> 20} MB for a block of {block >> 20} MB"

# The same numbers, at the block's first rows, from the generator alone.
torch.manual_seed(3)
step, kept = 1 << 20, torch.empty(0)
for pass_ in ("uniform_", "normal_"):
    done = 0
    while done < classes * width:
        size = min(step, classes * width - done)
        made = getattr(torch.empty(size), pass_)(*((0.0, 0.02) if pass_ == "normal_" else ()))
        if pass_ == "normal_" and dim == 0 and done <= classes // 4 * width < done + size:
            kept = made[classes // 4 * width - done :][:width].clone()
        done += size
assert torch.equal(after, torch.rand(3))
if dim == 0:
    assert torch.equal(head.weight[0], kept)
try:
    torch.empty(classes, width)
except RuntimeError:
    print("the whole does not fit")
"""


def run(classes: int, dim: int) -> str:
    command = [sys.executable, "-c", PROGRAM, *map(str, (classes, WIDTH, ROOM, dim))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and limits data")
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_a_head_is_never_whole(dim: int) -> None:
    assert "the whole does not fit" in run(131_072, dim)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and limits data")
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_a_head_of_a_million_classes_is_never_whole(dim: int) -> None:
    assert "the whole does not fit" in run(1_000_000, dim)

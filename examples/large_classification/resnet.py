"""The features of a ResNet with bottleneck blocks (He et al., 2015), written by hand in plain PyTorch.

The stride of a block is in its 3×3 convolution, as in most ResNet-50s of today ("v1.5").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Bottleneck(nn.Module):
    """1×1 down, 3×3, 1×1 up to 4 × `width` channels, beside a shortcut."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * self.expansion
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        nn.init.zeros_(self.bn3.weight)  # a block starts as its shortcut, which makes deep networks easier to train
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images (rows, 3, height, width) to `features` numbers each; the classification layer is somebody else's."""

    def __init__(self, width: int, blocks: Sequence[int]) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            inner = width * 2**stage
            for block in range(count):
                stages.append(Bottleneck(channels, inner, stride=2 if stage and not block else 1))
                channels = inner * Bottleneck.expansion
        self.blocks = nn.Sequential(*stages)
        self.features = channels
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.stem(images)).mean(dim=(2, 3))


def resnet50() -> ResNet:
    """23.5 million parameters, 2048 features."""
    return ResNet(64, (3, 4, 6, 3))


def resnet_small() -> ResNet:
    """128 thousand parameters, 256 features: for a machine without GPUs."""
    return ResNet(8, (1, 1, 1, 1))


BACKBONES = {"resnet50": resnet50, "small": resnet_small}

"""Trains a ResNet-50 on made-up images, or on a folder of real ones (--data). `python train.py --help` says more."""

from __future__ import annotations

import argparse
import time
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from images import ImageFolder, SyntheticImages
from resnet import ResNet
from torch import nn
from torch.utils.data import DataLoader

import epl


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a folder with one sub-folder of images per class")
    parser.add_argument("--image_size", type=int, default=32, help="height and width; 224 for real images")
    parser.add_argument("--batch_size", type=int, default=16, help="images of one device in one step")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, help="instead of --epochs")
    parser.add_argument(
        "--width", type=int, default=64, help="channels of the stem; 64 is ResNet-50, 8 runs in no time"
    )
    parser.add_argument("--classes", type=int, default=10, help="of the made-up images")
    parser.add_argument("--images", type=int, default=320, help="how many to make up")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--workers", type=int, default=0, help="processes that read images, for each device")
    return parser.parse_args()


def main() -> None:
    options = parse()
    epl.init()
    epl.set_default_strategy(epl.replicate(device_count=1))
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    if options.data is not None:
        images, held_out = (ImageFolder(options.data, options.image_size, held_out=h) for h in (False, True))
        num_classes = len(images.classes)
    else:
        num_classes = options.classes
        images = SyntheticImages(options.images, num_classes, options.image_size)
        held_out = SyntheticImages(5 * num_classes, num_classes, options.image_size, seed=10**6)
    loader = DataLoader(images, options.batch_size, shuffle=True, drop_last=True, num_workers=options.workers)
    held_out_loader = DataLoader(held_out, options.batch_size, num_workers=options.workers)
    model = ResNet(num_classes, options.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=1e-4)
    model, optimizer, loader, held_out_loader = epl.parallelize(model, optimizer, loader, held_out_loader)

    if not len(loader):
        raise SystemExit(f"{len(images)} images do not fill one global batch: more of them, or a smaller --batch_size")
    steps = options.steps or options.epochs * len(loader)
    shown = max(1, steps // 20)
    start = time.perf_counter()
    for step, (x, y) in enumerate(islice(chain.from_iterable(repeat(loader)), steps), start=1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        if epl.Env.get().cluster.is_first_rank and (step % shown == 0 or step == steps):
            speed = step * options.batch_size * epl.num_replicas() / (time.perf_counter() - start)
            print(f"step {step}/{steps}  loss {loss.item():.4f}  {speed:.0f} images/s", flush=True)

    correct, total = evaluate(model, held_out_loader, device)
    if epl.Env.get().cluster.is_first_rank:
        print(f"Train Finished. {steps} steps, held-out accuracy {correct / total:.1%} ({correct} of {total} images).")


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, int]], device: torch.device) -> tuple[int, int]:
    """How many of the images of all ranks are recognised, and how many there are."""
    model.eval()
    correct = total = 0
    for x, y in loader:
        right = model(x.to(device)).argmax(dim=1) == y.to(device)
        correct += int(epl.global_sum(right.sum()))
        total += int(epl.global_sum(len(y)))
    model.train()
    return correct, total


if __name__ == "__main__":
    main()

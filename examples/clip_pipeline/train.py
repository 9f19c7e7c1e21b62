"""Trains a small CLIP as a pipeline: the image tower in the first stages, the text tower and the loss in the last.

`python train.py --help` lists the options; --plain is the same training on one device, without epl.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from clip import Size, Stage
from pairs import PairFolder, SyntheticPairs

import epl

Pairs = SyntheticPairs | PairFolder


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, help="devices of one pipeline; by default all ranks are one pipeline")
    parser.add_argument(
        "--plain", action="store_true", help="one device and plain PyTorch: what the pipeline must equal"
    )
    parser.add_argument("--batch_size", type=int, default=32, help="pairs of one pipeline in one step")
    parser.add_argument("--micro_batches", type=int, default=4)
    parser.add_argument("--schedule", default="PreferBackward", help="pipeline.strategy, such as ZeroBubble")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--data", type=Path, help="a folder of images, each with a text beside it (a.jpg and a.txt)")
    parser.add_argument("--pairs", type=int, default=512, help="how many to make up")
    parser.add_argument("--width", type=int, default=Size.width)
    parser.add_argument("--image_depth", type=int, default=Size.image_depth, help="blocks of the image tower")
    parser.add_argument("--text_depth", type=int, default=Size.text_depth, help="blocks of the text tower")
    parser.add_argument("--image_size", type=int, default=Size.image_size)
    parser.add_argument(
        "--trace", type=Path, help="write when every action of the last step happened, for ui.perfetto.dev"
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    size = Size(
        width=options.width,
        image_depth=options.image_depth,
        text_depth=options.text_depth,
        image_size=options.image_size,
    )
    if options.data is not None:
        pairs: Pairs = PairFolder(options.data, size.image_size, size.text_length)
    else:
        pairs = SyntheticPairs(options.pairs, size.image_size, size.text_length)
    if options.plain:
        train_plainly(options, size, pairs)
    else:
        train(options, size, pairs)


def train(options: argparse.Namespace, size: Size, pairs: Pairs) -> None:
    """The training loop of one rank, which builds and trains its own stage."""
    epl.init(epl.Config({"pipeline.num_micro_batch": options.micro_batches, "pipeline.strategy": options.schedule}))
    cluster = epl.Env.get().cluster
    stages = options.stages or cluster.world_size
    topology = epl.setup_process_groups([("data", cluster.world_size / stages), ("pipe", stages)])
    is_first, is_last = topology.is_first("pipe"), topology.is_last("pipe")
    stage = Stage(topology.rank("pipe"), stages, size).to(cluster.device)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=options.lr)

    def features(received: object, images: torch.Tensor | None, texts: torch.Tensor | None) -> object:
        x = stage.patches(images) if is_first else received
        for block in stage.blocks:
            x = block(x)
        return (stage.image_head(x), stage.text_tower(texts)) if is_last else x

    def my_stage_forward(received: object, images: torch.Tensor | None, texts: torch.Tensor | None) -> object:
        found = features(received, images, texts)
        return stage.loss(*found) if is_last else found

    def my_part(rows: list[int]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Images where they are looked at, texts where they are read; in between a rank needs nothing."""
        return (
            pairs.images(rows).to(cluster.device) if is_first else None,
            pairs.texts(rows).to(cluster.device) if is_last else None,
        )

    replica, replicas = topology.rank("data"), topology.size("data")
    for step, rows in enumerate(batches(pairs, options.batch_size * replicas, options.steps), start=1):
        own = rows[replica * options.batch_size : (replica + 1) * options.batch_size]
        recorded = options.trace is not None and step == options.steps
        with epl.record_trace(options.trace) if recorded else contextlib.nullcontext():
            optimizer.zero_grad()
            losses = epl.forward_backward(my_stage_forward, *my_part(own), module=stage)
            optimizer.step()
        loss = epl.global_mean(losses.mean())
        if cluster.is_first_rank:
            report(step, options.steps, loss)

    stage.eval()
    own = list(range(min(options.batch_size, len(pairs))))
    found = epl.forward_eval(features, *my_part(own))
    if cluster.is_first_rank:
        print(f"Train Finished. {retrieved(found, pairs.texts(own))}")


def train_plainly(options: argparse.Namespace, size: Size, pairs: Pairs) -> None:
    """The same numbers from one device: the loss of each micro batch, weighted by its pairs."""
    model = Stage(0, 1, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    def features(images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = model.patches(images)
        for block in model.blocks:
            x = block(x)
        return model.image_head(x), model.text_tower(texts)

    for step, rows in enumerate(batches(pairs, options.batch_size, options.steps), start=1):
        optimizer.zero_grad()
        losses = []
        for part in torch.tensor(rows).tensor_split(options.micro_batches):
            loss = model.loss(*features(pairs.images(part.tolist()), pairs.texts(part.tolist())))
            (loss * len(part) / len(rows)).backward()
            losses.append(loss.detach())
        optimizer.step()
        report(step, options.steps, torch.stack(losses).mean())

    model.eval()
    own = list(range(min(options.batch_size, len(pairs))))
    with torch.no_grad():
        print(f"Train Finished. {retrieved([features(pairs.images(own), pairs.texts(own))], pairs.texts(own))}")


def batches(pairs: Pairs, size: int, steps: int) -> Iterator[list[int]]:
    """The rows of each global batch, shuffled anew in every epoch and alike on every rank."""
    if len(pairs) < size:
        raise SystemExit(f"{len(pairs)} pairs do not fill one global batch of {size}: more of them, or a smaller batch")
    per_epoch = len(pairs) // size
    for step in range(steps):
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(epoch))
        yield order[place * size : (place + 1) * size].tolist()


def report(step: int, steps: int, loss: torch.Tensor) -> None:
    if step % max(1, steps // 20) == 0 or step == steps:
        print(f"step {step}/{steps}  loss {loss.item():.6f}", flush=True)


def retrieved(found: list[tuple[torch.Tensor, torch.Tensor]], texts: torch.Tensor) -> str:
    """How many images find a text that says what theirs says, among those of the whole batch."""
    images, of_texts = (torch.nn.functional.normalize(torch.cat(parts).cpu()) for parts in zip(*found, strict=True))
    chosen = (images @ of_texts.T).argmax(dim=1)
    right = int((texts[chosen] == texts).all(dim=1).sum())
    return f"{right} of {len(texts)} images find their text."


if __name__ == "__main__":
    main()

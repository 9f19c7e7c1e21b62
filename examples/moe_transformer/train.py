"""Trains a translation model with layers of experts, which are split over all devices; then translates and scores.

`python train.py --generate_data` prepares a made-up corpus and trains on it; `--help` lists the options.
"""

from __future__ import annotations

import argparse
import time
from itertools import chain, islice, repeat

import torch
from bleu import bleu
from generate_data import add_options, generate_data, open_data
from model import Size, Translator
from subwords import BOS, EOS, PAD, Subwords
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import epl

Loader = DataLoader[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--generate_data", action="store_true", help="prepare the corpus first; the next options say which"
    )
    add_options(parser)
    parser.add_argument("--batch_size", type=int, default=32, help="sentences of all devices in one step")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lr", type=float, default=5e-3, help="the highest learning rate")
    parser.add_argument("--warmup", type=float, default=0.1, help="share of the steps in which the rate rises")
    parser.add_argument(
        "--balance", type=float, default=0.01, help="weight of the loss that keeps experts equally busy"
    )
    parser.add_argument("--experts", type=int, default=Size.experts, help="of each layer of experts")
    parser.add_argument("--top_k", type=int, choices=(1, 2), default=Size.top_k, help="experts that a token is sent to")
    parser.add_argument("--capacity_factor", type=float, default=Size.capacity_factor)
    parser.add_argument("--moe", choices=("epl", "einsum"), default=Size.moe, help="epl.nn, or einsum as in the manual")
    parser.add_argument("--width", type=int, default=Size.width)
    parser.add_argument("--hidden", type=int, default=Size.hidden, help="width inside each expert")
    parser.add_argument("--layers", type=int, default=Size.layers, help="of the encoder, and of the decoder")
    parser.add_argument("--heads", type=int, default=Size.heads)
    parser.add_argument("--dropout", type=float, default=Size.dropout)
    options = parser.parse_args()
    if not options.generate_data and (options.source or options.target or options.pairs):
        parser.error("--source, --target and --pairs say what --generate_data prepares: add it, or leave them out")
    return options


def main() -> None:
    options = parse()
    epl.init(epl.Config({"cluster.colocate_split_and_replicate": True}))
    cluster = epl.Env.get().cluster
    epl.set_default_strategy(epl.replicate(cluster.total_gpu_num))
    torch.manual_seed(0)

    if options.generate_data:
        if cluster.local_rank == 0:  # once on every machine
            done = generate_data(options)
            if cluster.is_first_rank:
                print(done, flush=True)
        epl.global_sum(0)  # the others wait for it here
    subwords, sentences, held_out = open_data(options.data_dir)
    size = Size(
        vocabulary=len(subwords),
        width=options.width,
        heads=options.heads,
        layers=options.layers,
        hidden=options.hidden,
        experts=options.experts,
        top_k=options.top_k,
        capacity_factor=options.capacity_factor,
        moe=options.moe,
        dropout=options.dropout,
    )
    if len(sentences) < options.batch_size:
        raise SystemExit(f"{len(sentences)} sentences do not fill one batch: more of them, or a smaller --batch_size")
    loader = DataLoader(sentences, options.batch_size, shuffle=True, drop_last=True)
    held_out_loader = DataLoader(held_out, options.batch_size)
    model = Translator(size).to(cluster.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.98))
    model, optimizer, loader, held_out_loader = epl.parallelize(model, optimizer, loader, held_out_loader)

    train(model, optimizer, loader, options)
    report(model)
    translations = translate(model, held_out_loader, subwords)
    right = [subwords.decode(held_out.target(at)) for at in range(len(held_out))]
    if cluster.is_first_rank:
        same = sum(a == b for a, b in zip(translations, right, strict=True))
        score = bleu(translations, right)
        print(f"Train Finished. BLEU {score:.1f}, {same} of {len(right)} held-out sentences translated word for word.")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader, options: argparse.Namespace) -> None:
    """The loop of a script for one device, but for the numbers over all ranks."""
    cluster = epl.Env.get().cluster
    rising = max(1, round(options.warmup * options.steps))

    def rate(step: int) -> float:
        return min((step + 1) / rising, (options.steps - step) / max(1, options.steps - rising))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    shown, start = max(1, options.steps // 20), time.perf_counter()
    model.train()
    for step, batch in enumerate(islice(chain.from_iterable(repeat(loader)), options.steps), start=1):
        source, said, to_say = (part.to(cluster.device) for part in batch)
        optimizer.zero_grad()
        output = model(source, said)
        wrong = F.cross_entropy(output.logits.flatten(0, 1), to_say.flatten(), ignore_index=PAD, reduction="sum")
        # By the tokens of all ranks, for sentences differ in length: the mean over ranks is then that over all tokens.
        loss = wrong / epl.global_mean((to_say != PAD).sum()) + options.balance * output.balance
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % shown == 0 or step == options.steps:
            everywhere, balance = epl.global_mean(loss.detach()).item(), epl.global_mean(output.balance.detach()).item()
            if cluster.is_first_rank:
                took = 1000 * (time.perf_counter() - start) / step
                print(
                    f"step {step}/{options.steps}  loss {everywhere:.6f}  balance {balance:.4f}  {took:.0f} ms/step",
                    flush=True,
                )


def report(model: Translator) -> None:
    """How many tokens each expert was sent during training, and how many found no place."""
    for number, layer in enumerate(model.expert_layers()):
        *counts, lost = layer.sent()
        if epl.Env.get().cluster.is_first_rank:
            tokens = ", ".join(map(str, counts))
            print(f"expert layer {number}: tokens per expert {tokens}; {lost} of {sum(counts)} found no place")


@torch.no_grad()
def translate(model: nn.Module, loader: Loader, subwords: Subwords) -> list[str]:
    """The translation of every sentence, piece by piece the likeliest; in the order of the sentences, on every rank."""
    device = epl.Env.get().cluster.device
    model.eval()
    translations = []
    for source, _, _ in loader:
        source = source.to(device)
        said = torch.full_like(source, PAD)
        said[:, 0] = BOS
        ended = torch.zeros(len(source), dtype=torch.bool, device=device)
        for at in range(1, source.shape[1]):
            piece = model(source, said).logits[:, at - 1].argmax(-1)
            said[:, at] = piece.masked_fill(ended, PAD)
            ended |= piece == EOS
            # Experts of all ranks answer together: no rank stops before the others.
            if not epl.global_sum((~ended).sum()):
                break
        translations += [subwords.decode(row) for row in epl.gather_for_metrics(said)[:, 1:].tolist()]
    return translations


if __name__ == "__main__":
    main()

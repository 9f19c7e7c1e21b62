"""Fine-tunes BERT to answer questions (SQuAD v1.1) as a pipeline of two stages, then answers and scores.

`python train.py --help` lists the options. Without any, a small new model learns the sample beside this file by heart.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from answers import best_answers
from evaluate import scores
from model import annotate, load, make_small
from squad import WindowDataset, make_windows, read_questions, texts_of
from torch import nn
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

import epl

SAMPLE = Path(__file__).parent / "sample/squad.json"
Loader = DataLoader[dict[str, torch.Tensor]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory with weights and vocabulary of a BERT")
    parser.add_argument("--train_file", type=Path, default=SAMPLE, help="SQuAD v1.1, such as train-v1.1.json")
    parser.add_argument("--predict_file", type=Path, default=SAMPLE, help="SQuAD v1.1, such as dev-v1.1.json")
    parser.add_argument("--output_dir", type=Path, help="where predictions.json and the trained model are written")
    parser.add_argument("--stages", type=int, default=2, help="devices of one pipeline; 1 is data parallelism alone")
    parser.add_argument("--micro_batches", type=int, default=4, help="pipeline.num_micro_batch")
    parser.add_argument("--batch_size", type=int, default=4, help="windows of one micro batch")
    parser.add_argument("--epochs", type=float, default=40.0, help="0 only answers; 2 for a pretrained model")
    parser.add_argument("--lr", type=float, default=1e-3, help="the highest learning rate; 3e-5 for a pretrained model")
    parser.add_argument("--warmup", type=float, default=0.1, help="share of the steps in which the rate rises")
    parser.add_argument(
        "--max_length", type=int, default=96, help="tokens of a window at most; 384 for a pretrained model"
    )
    parser.add_argument(
        "--doc_stride",
        type=int,
        default=32,
        help="tokens that a window shares with the next; 128 for a pretrained model",
    )
    parser.add_argument("--max_answer_length", type=int, default=30, help="tokens of an answer at most")
    parser.add_argument("--n_best", type=int, default=20, help="starts, and ends, that are tried in each window")
    parser.add_argument("--width", type=int, default=64, help="hidden size of the small new model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the small new model")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse()
    epl.init(epl.Config({"pipeline.num_micro_batch": options.micro_batches}))
    cluster = epl.Env.get().cluster
    torch.manual_seed(options.seed)

    known, asked = read_questions(options.train_file), read_questions(options.predict_file)
    learnt = [question for question in known if question.is_placed()]
    if cluster.is_first_rank and len(learnt) < len(known):
        print(f"{len(known) - len(learnt)} questions are left out: no answer where {options.train_file} says")
    if options.model is not None:
        model, tokenizer = load(options.model, options.max_length)
    else:
        model, tokenizer = make_small(texts_of(known), options.max_length, width=options.width, layers=options.layers)
    annotate(model, options.stages)
    model.to(cluster.device)

    windows, asked_windows = (
        make_windows(questions, tokenizer, options.max_length, options.doc_stride) for questions in (learnt, asked)
    )
    pad = tokenizer.pad_token_id
    loader = DataLoader(WindowDataset(windows, pad, learn=True), options.batch_size, shuffle=True)
    asked_loader = DataLoader(WindowDataset(asked_windows, pad, learn=False), options.batch_size)
    optimizer = torch.optim.AdamW(decayed_or_not(model), lr=options.lr)
    model, optimizer, loader, asked_loader = epl.parallelize(model, optimizer, loader, asked_loader)

    train(model, optimizer, loader, options)
    start_logits, end_logits = read(model, asked_loader)
    predictions = best_answers(
        asked,
        asked_windows,
        start_logits,
        end_logits,
        n_best=options.n_best,
        max_answer_length=options.max_answer_length,
    )
    whole = epl.full_state_dict(model) if options.output_dir else {}
    if cluster.is_first_rank:
        if options.output_dir:
            model.save_pretrained(options.output_dir, state_dict=whole)
            tokenizer.save_pretrained(options.output_dir)
            text = json.dumps(predictions, ensure_ascii=False, indent=1)
            (options.output_dir / "predictions.json").write_text(text, encoding="utf-8")
        found = scores({question.id: [text for _, text in question.answers] for question in asked}, predictions)
        print(f"Train Finished. f1 {found['f1']:.1f}, exact_match {found['exact_match']:.1f} ({len(asked)} questions)")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader, options: argparse.Namespace) -> None:
    """The loop of a script for one device: nothing in it knows of stages or micro batches."""
    cluster = epl.Env.get().cluster
    steps = round(options.epochs * len(loader))
    schedule = get_linear_schedule_with_warmup(optimizer, round(options.warmup * steps), steps)
    shown, step, start = max(1, steps // 20), 0, time.perf_counter()
    model.train()
    while step < steps:
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**{name: value.to(cluster.device) for name, value in batch.items()}).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            if step % shown == 0 or step == steps:
                everywhere = epl.global_mean(loss.detach()).item()
                if cluster.is_first_rank:
                    took = 1000 * (time.perf_counter() - start) / step
                    print(f"step {step}/{steps}  loss {everywhere:.6f}  {took:.0f} ms/step", flush=True)
            if step == steps:
                return


@torch.no_grad()
def read(model: nn.Module, loader: Loader) -> tuple[torch.Tensor, torch.Tensor]:
    """The start and end logits of every window, in the order of the windows; on every rank."""
    device = epl.Env.get().cluster.device
    model.eval()
    starts, ends = [], []
    for batch in loader:
        found = model(**{name: value.to(device) for name, value in batch.items()})
        starts.append(epl.gather_for_metrics(found.start_logits).cpu())
        ends.append(epl.gather_for_metrics(found.end_logits).cpu())
    return torch.cat(starts), torch.cat(ends)


def decayed_or_not(model: nn.Module) -> list[dict[str, object]]:
    """Parameter groups: weights decay, as BERT was trained; biases and layer norms do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


if __name__ == "__main__":
    main()

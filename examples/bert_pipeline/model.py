"""The model and its tokenizer, from a Hugging Face directory or small and new, and how the model is cut into stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from transformers import AutoTokenizer, BertConfig, BertForQuestionAnswering, BertTokenizer, PreTrainedTokenizerBase

import epl

MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def annotate(model: BertForQuestionAnswering, stages: int) -> None:
    """Makes `stages` TaskGraphs of an unmodified model: the embeddings with the first layers, …, the last with the head."""
    layers = list(model.bert.encoder.layer)
    if not 1 <= stages <= len(layers):
        raise SystemExit(f"--stages {stages}: expected 1 to {len(layers)}, the layers of this model")
    for stage in range(stages):
        parts = layers[len(layers) * stage // stages : len(layers) * (stage + 1) // stages]
        if stage == 0:
            parts = [model.bert.embeddings, *parts]
        if stage == stages - 1:
            parts = [*parts, model.qa_outputs]
        epl.annotate(epl.replicate(1, name=f"stage_{stage}"), *parts)


def load(folder: Path, max_length: int) -> tuple[BertForQuestionAnswering, PreTrainedTokenizerBase]:
    """Weights and vocabulary of a directory in Hugging Face's format; nothing is downloaded."""
    if not (folder / "config.json").is_file():
        raise SystemExit(f"--model {folder}: expected a Hugging Face directory, found no config.json there")
    model = BertForQuestionAnswering.from_pretrained(folder, local_files_only=True)
    longest = model.config.max_position_embeddings
    if max_length > longest:
        raise SystemExit(
            f"--max_length {max_length}: expected at most {longest}, the positions of the model in {folder}"
        )
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def make_small(
    texts: Iterable[str], max_length: int, *, width: int, layers: int
) -> tuple[BertForQuestionAnswering, PreTrainedTokenizerBase]:
    """A small model with random weights, without dropout, and a tokenizer for the words of these texts."""
    tokenizer = BertTokenizer(vocab=make_vocabulary(texts))
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=max_length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForQuestionAnswering(config), tokenizer


def make_vocabulary(texts: Iterable[str], size: int = 8000) -> dict[str, int]:
    """WordPiece tokens by number: the marks, every character alone and inside a word, then the commonest words.

    Every process must build the same one. The trainers of `tokenizers` do not promise that: they number the pieces of a
    word in the order of a hash table, another one in each process.
    """
    pipeline = BertTokenizer().backend_tokenizer
    words = Counter(
        word
        for text in texts
        for word, _ in pipeline.pre_tokenizer.pre_tokenize_str(pipeline.normalizer.normalize_str(text))
    )
    characters = sorted({character for word in words for character in word})
    commonest = sorted(words, key=lambda word: (-words[word], word))
    tokens = dict.fromkeys((*MARKS, *characters, *(f"##{character}" for character in characters)))
    tokens |= dict.fromkeys(commonest[: max(0, size - len(tokens))])
    return {token: number for number, token in enumerate(tokens)}

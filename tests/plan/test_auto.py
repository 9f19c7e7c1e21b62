"""Automatic stages against brute force, and the words they are given in."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epl.errors import PlanError
from epl.plan.auto import Part, cut_parts


def all_cuts(count: int, num_stages: int) -> list[list[tuple[int, int]]]:
    return [list(pairwise((0, *inner, count))) for inner in combinations(range(1, count), num_stages - 1)]


def memory_of(parts: list[Part], live: int) -> int:
    return sum(({k: v for p in parts for k, v in p.weights.items()}).values()) + live * sum(
        p.activations for p in parts
    )


SHARED = {"a": 5, "b": 7, "c": 11}
PARTS = st.builds(
    lambda time, names, activations: Part("part", time, {name: SHARED[name] for name in names}, activations),
    st.integers(0, 9).map(float),
    st.lists(st.sampled_from(sorted(SHARED)), unique=True),
    st.integers(0, 4),
)


@settings(max_examples=150)
@given(st.lists(PARTS, min_size=1, max_size=8), st.data())
def test_no_other_cut_is_better(parts: list[Part], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(parts)))
    live = data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    limit = data.draw(st.none() | st.integers(0, 60))
    judged = []
    for cut in all_cuts(len(parts), count):
        times = [sum(p.time for p in parts[start:stop]) for start, stop in cut]
        memory = [memory_of(parts[start:stop], live[s]) for s, (start, stop) in enumerate(cut)]
        if limit is None or max(memory) <= limit:
            judged.append((max(times), max(memory), sum(t * t for t in times), cut))
    if not judged:
        with pytest.raises(PlanError, match="cannot hold the model"):
            cut_parts(parts, count, live=live, memory_limit=limit)
        return
    found = cut_parts(parts, count, live=live, memory_limit=limit)
    best = min(judged)
    assert (list(found.stages)) in [cut for *quality, cut in judged if quality == list(best[:3])]
    total = sum(p.time for p in parts)
    assert found.times == pytest.approx([sum(p.time for p in parts[a:b]) / (total or 1) for a, b in found.stages])
    assert found.memory == tuple(memory_of(parts[a:b], live[s]) for s, (a, b) in enumerate(found.stages))


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 7, 12, 13, 32, 100])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 7, 8])
def test_any_number_of_equal_layers_for_any_number_of_stages(layers: int, num_stages: int) -> None:
    parts = [Part(f"layers.{i}", 1.0, {f"w{i}": 100}, 1) for i in range(layers)]
    if layers < num_stages:
        with pytest.raises(PlanError, match=rf"{num_stages} stages are asked for, and the model has {layers} parts"):
            cut_parts(parts, num_stages)
        return
    cut = cut_parts(parts, num_stages)
    lengths = [stop - start for start, stop in cut.stages]
    assert sum(lengths) == layers
    assert max(lengths) - min(lengths) <= 1
    assert [cut.stage_of(0), cut.stage_of(layers - 1)] == [0, num_stages - 1]


def test_embeddings_and_head_are_counted() -> None:
    layers = [Part(f"h.{i}", 1.0) for i in range(12)]
    cut = cut_parts([Part("embed", 0.1), *layers, Part("norm", 0.1), Part("head", 4.0)], 2)
    assert cut.stages == ((0, 9), (9, 15))


def test_of_equally_fast_cuts_the_one_that_needs_less_memory() -> None:
    parts = [
        Part("slow", 9.0),
        Part("big", 1.0, {"big": 100}),
        Part("small", 1.0, {"s": 10}),
        Part("bigger", 1.0, {"c": 101}),
    ]
    assert cut_parts(parts, 3).stages == ((0, 1), (1, 3), (3, 4))


def test_a_tied_weight_counts_once_in_a_stage() -> None:
    tied = {"embed": 100}
    parts = [Part("embed", 1.0, tied), Part("body", 1.0, {"w": 1}), Part("head", 1.0, tied)]
    assert cut_parts(parts, 1).memory == (101,)
    assert cut_parts(parts, 3).memory == (100, 1, 100)


def test_the_memory_limit_moves_the_cut() -> None:
    parts = [Part("a", 1.0, {"a": 80}), Part("b", 1.0, {"b": 80}), Part("c", 2.0, {"c": 10}), Part("d", 1.0, {"d": 10})]
    assert cut_parts(parts, 2).stages == ((0, 2), (2, 4))
    assert cut_parts(parts, 2, memory_limit=100).stages == ((0, 1), (1, 4))
    with pytest.raises(PlanError, match="2 stages of at most 90 B cannot hold the model; the best cut needs 100 B"):
        cut_parts(parts, 2, memory_limit=90)


def test_the_reason() -> None:
    parts = [Part("embed", 1.0, {"e": 2048})] + [Part(f"h.{i}", 3.0, {f"h{i}": 1024}, 512) for i in range(4)]
    assert cut_parts(parts, 2, live=[2, 1]).reason.splitlines() == [
        "automatic stages: 5 parts cut into 2 so that the slowest takes 54% of the time (all alike: 50%)",
        "stage_0: embed, h.0-1: 54% of the time, 6 KiB",
        "stage_1: h.2-3: 46% of the time, 3 KiB",
    ]


def test_a_model_without_modules_is_refused() -> None:
    with pytest.raises(PlanError, match="calls no module"):
        cut_parts([], 2)

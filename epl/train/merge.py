"""How the parts of collected objects become one value each, and what keeps them from it; plain functions.

share       rows of the global batch that the loop of some ranks sees: those of a replica, or a part of them
level 1     the parts of a share (micro batches, lanes of a wide stage), by rows
level 2     the shares of a replica (LOCAL) or of all replicas (GLOBAL), by the rows that count
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from epl.graph.collections import Collected, How, Part, Place


class PartForm(NamedTuple):
    """A part without its numbers."""

    start: int
    rows: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Told(NamedTuple):
    """An object as a rank tells the others of it; see `Collected`."""

    place: Place
    rows: int | None
    shares: tuple[int, ...] | None
    on_stage: bool
    parts: tuple[PartForm, ...]

    @staticmethod
    def of(found: Collected) -> Told:
        """What a rank has of an object."""
        forms = tuple(PartForm(p.start, p.rows, tuple(p.value.shape), p.value.dtype) for p in found.parts)
        return Told(found.place, found.rows, found.shares, found.on_stage, forms)


class Rank(NamedTuple):
    """What a rank has: the objects, and the rows that its loop sees."""

    replica: int
    share: int
    objects: tuple[Told, ...]


def problems(how: How, ranks: Sequence[Rank], *, apart: bool) -> list[str]:
    """Why the objects of these ranks cannot be merged. `apart`: replicas are not merged with each other."""
    return _different_objects(ranks) or [
        *_strange_shares(ranks),
        *_missing_micro_batches(ranks),
        *_different_forms(how, ranks, apart),
    ]


def _different_objects(ranks: Sequence[Rank]) -> list[str]:
    """In the loop all ranks add alike; inside their models all shares do."""
    found = []
    in_loop = [[each.place for each in rank.objects if not each.on_stage] for rank in ranks]
    other = next((n for n, places in enumerate(in_loop) if places != in_loop[0]), None)
    if other is not None:
        found.append(
            f"rank 0 has added {len(in_loop[0])} objects in the loop, rank {other} {len(in_loop[other])}, or between other calls of the "
            "model: add them on every rank alike, not under `if rank == 0:`"
        )
    by_share: dict[int, set[Place]] = {}
    for rank in ranks:
        by_share.setdefault(rank.share, set()).update(each.place for each in rank.objects if each.on_stage)
    counts = [len(places) for _, places in sorted(by_share.items())]
    if any(places != by_share[ranks[0].share] for places in by_share.values()):
        found.append(
            f"the replicas have added {counts} objects inside their models, expected the same: whether a forward adds something must "
            "not depend on the data"
        )
    return found


def _strange_shares(ranks: Sequence[Rank]) -> list[str]:
    count = max(rank.share for rank in ranks) + 1
    found = {len(each.shares) for rank in ranks for each in rank.objects if each.shares is not None}
    if len({rank.share for rank in ranks}) == 1 or found <= {count}:
        return []
    return [
        f"the batch was divided into {sorted(found)} shares, and the model that was given to epl.parallelize last has {count}: read the "
        "collection before another model is parallelized"
    ]


def _missing_micro_batches(ranks: Sequence[Rank]) -> list[str]:
    seen: dict[tuple[int, Place], int] = {}
    whole: dict[tuple[int, Place], int | None] = {}
    for rank in ranks:
        for each in rank.objects:
            if each.on_stage:
                seen[rank.share, each.place], whole[rank.share, each.place] = 0, each.rows
    for number, n, part in counted(ranks):
        each = ranks[number].objects[n]
        if each.on_stage:
            seen[ranks[number].share, each.place] += each.parts[part].rows
    missing = [f"{rows} of {whole[key]}" for key, rows in seen.items() if rows != whole[key]]
    if not missing:
        return []
    return [
        f"an object was added for {missing[0]} rows of the batch only, expected all: whether a forward adds something must not depend "
        "on the micro batch. Add a zero, or an empty tensor, where there is nothing to add"
    ]


def _different_forms(how: How, ranks: Sequence[Rank], apart: bool) -> list[str]:
    forms: dict[tuple[int, Place], dict[tuple[object, ...], PartForm]] = {}
    for rank in ranks:
        for each in rank.objects:
            seen = forms.setdefault((rank.replica if apart else 0, each.place), {})
            for part in each.parts:
                shape = ("rows", *part.shape[1:]) if how == "CONCAT" and part.shape else part.shape
                seen.setdefault((part.dtype, shape), part)
    found = next((seen for seen in forms.values() if len(seen) > 1), None)
    if found is None:
        return []
    shapes = " and ".join(f"{part.shape} {part.dtype}" for part in found.values())
    wanted = "that differ in dim 0 only" if how == "CONCAT" else "of one shape and dtype"
    return [
        f"{how} merges values {wanted} over micro batches and replicas, found {shapes}. A value with rows of the batch goes into a "
        "CONCAT collection, or is reduced over them first: .mean(0), .sum(0)"
    ]


def counted(ranks: Sequence[Rank]) -> Iterator[tuple[int, int, int]]:
    """(rank, object, part) of every part that counts: of what several ranks of a share have, the first one's does.

    In the loop all ranks have it. Inside the model those that compute the same rows do: the ranks of a split.
    """
    had: set[tuple[int, Place, int]] = set()
    for number, rank in enumerate(ranks):
        for n, each in enumerate(rank.objects):
            for part, form in enumerate(each.parts):
                key = (rank.share, each.place, form.start)
                if key not in had:
                    had.add(key)
                    yield number, n, part


def merge_all(how: How, ranks: Sequence[Rank], value: Callable[[int, int, int], torch.Tensor]) -> list[torch.Tensor]:
    """One value for each object of these ranks, in order. `value` gives the numbers of a part that counts."""
    found: dict[Place, dict[int, list[Part]]] = {}
    about: dict[tuple[Place, int], Told] = {}
    for rank, number, part in counted(ranks):
        told, share = ranks[rank].objects[number], ranks[rank].share
        form = told.parts[part]
        about[told.place, share] = told
        parts = found.setdefault(told.place, {}).setdefault(share, [])
        parts.append(Part(form.start, form.rows, value(rank, number, part)))
    merged = []
    for place, by_share in sorted(found.items()):
        rows = _rows_that_count({share: about[place, share] for share in by_share})
        level_1 = {share: merge(how, parts) for share, parts in by_share.items() if share in rows}
        merged.append(merge(how, [Part(share, rows[share], value) for share, value in level_1.items()]))
    return merged


def _rows_that_count(told: dict[int, Told]) -> dict[int, int]:
    """By share. Those without rows of their own are left out, unless there is no other."""
    if len(told) == 1:
        return dict.fromkeys(told, 1)
    rows = {
        share: each.shares[share] if each.shares is not None else 1 if each.rows is None else each.rows
        for share, each in told.items()
    }
    return {share: count for share, count in rows.items() if count} or dict.fromkeys(rows, 1)


def merge(how: How, parts: Sequence[Part]) -> torch.Tensor:
    """One value, in memory of its own."""
    ordered = sorted(parts, key=lambda part: part.start)
    values = [part.value for part in ordered]
    if how == "CONCAT":
        return torch.cat([value.reshape(1) if value.dim() == 0 else value for value in values])
    if how == "SUM":
        return torch.stack(values).sum(0)  # of truth values: how many
    if not (values[0].is_floating_point() or values[0].is_complex()):
        values = [value.to(torch.get_default_dtype()) for value in values]
    total = sum(part.rows for part in ordered)
    return torch.stack([value * (part.rows / total) for value, part in zip(values, ordered, strict=True)]).sum(0)

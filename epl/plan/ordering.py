"""The order of things that feed each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set


def after_what_feeds_them(names: Sequence[str], feeds: Mapping[str, Set[str]]) -> tuple[str, ...]:
    """The names, each after all that `feeds` says it uses values of, else as they were given.

    Those that feed each other in a circle stay as they were given among themselves, after what feeds the circle.
    """
    before = _all_before(names, feeds)
    left, order = list(names), list[str]()
    while left:
        # Next is the first of those that only wait for what waits for them too.
        chosen = next(each for each in left if all(each in before[other] for other in before[each] if other in left))
        left.remove(chosen)
        order.append(chosen)
    return tuple(order)


def _all_before(names: Sequence[str], feeds: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """For each name those it uses values of, also through others."""
    before = {name: set(feeds.get(name, ())) - {name} for name in names}
    size = -1
    while size != (size := sum(map(len, before.values()))):
        for found in before.values():
            found.update(*(before[each] for each in found))
    return before

from __future__ import annotations

from epl.parallel.pipeline.lanes import Lanes


def test_places_of_lanes():
    lanes = Lanes.of((1, 2, 1), own=2)
    assert lanes.ranks == ((0,), (1, 2), (3,))
    assert (lanes.size, lanes.stages, lanes.lane(1), lanes.width(1)) == (4, (1,), 1, 2)
    assert not lanes.is_plain
    home = Lanes.of((2, 2), own=2, num_chunks=2, home=True)
    assert home.ranks == ((0, 1), (2, 3), (0, 1), (2, 3), (2,))
    assert home.stages == (1, 3, 4)
    assert Lanes.of((2, 2), own=3, num_chunks=2, home=True).stages == (1, 3)


def test_plain_ones_need_no_bridge():
    assert Lanes.of((1, 1, 1), own=0).is_plain
    assert Lanes.of((1, 1), own=1, num_chunks=2).is_plain
    assert not Lanes.of((1, 1), own=1, home=True).is_plain  # stage 2 is on the second rank, not on the first
    assert not Lanes(((0,), (2,), (1,)), own=0).is_plain  # stages in another order than ranks


def test_every_pair_of_lanes_has_an_edge_of_its_own_that_tells_the_rank():
    lanes = Lanes.of((2, 3), own=0, num_chunks=2)
    edges = [(0, 1), (1, 2), (2, 3), (0, 3)]
    channels = [
        lanes.channel(e, m, u) for e in edges for m in range(lanes.width(e[0])) for u in range(lanes.width(e[1]))
    ]
    assert len(set(channels)) == len(channels) == 24
    assert lanes.channel((0, 3), 1, 2) == (0 * 5 + 1, 3 * 5 + 4)
    assert lanes.stage_edge(lanes.channel((0, 3), 1, 2)) == (0, 3)
    assert lanes.name(lanes.channel((0, 3), 1, 2)[1]) == "stage 3 (lane 2)"


def test_rows_of_a_lane():
    lanes = Lanes.of((1, 3), own=3)
    rows = lanes.rows(1, 7)
    assert (rows.start, rows.stop, rows.weight) == (5, 7, 2 / 7)
    alone = lanes.rows(1, 2)
    assert (alone.start, alone.stop, alone.padding) == (1, 2, True)


def test_edges_of_one_device_that_travel():
    lanes = Lanes.of((2, 2), own=0, num_chunks=2, home=True)
    layouts = {(0, 1): (0,), (0, 2): (0, "average"), (1, 3): (0, "same"), (3, 4): (0,), (1, 4): (0,)}
    assert lanes.bridged(layouts, layouts) == ((0, 2), (3, 4), (1, 4))

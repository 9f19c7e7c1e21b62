from __future__ import annotations

import pytest

from epl.data.share import BatchShare, DataShare


def test_a_share_knows_its_place() -> None:
    share = DataShare(replicas=3, replica=1, parts=2, part=1, num_micro_batch=4)
    assert (share.shares, share.index, share.group, share.alone) == (6, 3, 12, False)
    assert DataShare(num_micro_batch=2).alone
    assert not DataShare(copies=2).alone


@pytest.mark.parametrize("rows", [(4, 4), (3, 2), (1, 0), (5, 1, 0)])
def test_weights_make_the_mean_of_all_rows(rows: tuple[int, ...]) -> None:
    divided = [BatchShare(rows, index) for index in range(len(rows))]
    assert sum(d.fraction for d in divided) == pytest.approx(1)
    assert sum(d.weight for d in divided) / len(rows) == pytest.approx(1)
    assert [d.fraction * sum(rows) for d in divided] == pytest.approx(list(rows))
    assert [d.padded for d in divided] == [n == 0 for n in rows]
    assert divided[0].even == (len(set(rows)) == 1)


def test_a_batch_without_rows_weighs_nothing() -> None:
    assert BatchShare((0, 0), 0).weight == 0
    assert BatchShare((0, 0), 0).fraction == 0

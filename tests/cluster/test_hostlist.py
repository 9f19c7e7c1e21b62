"""Slurm's short forms."""

from __future__ import annotations

import pytest

from epl.cluster.hostlist import expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login2", ["login2"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,07],login2", ["gpu01", "gpu02", "gpu03", "gpu07", "login2"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("n[1,3]-ib", ["n1-ib", "n3-ib"]),
        ("rack[1-2]node[1-2]", ["rack1node1", "rack1node2", "rack2node1", "rack2node2"]),
        ("a[1-2],b[3]", ["a1", "a2", "b3"]),
        ("node-1.example.org", ["node-1.example.org"]),
        (" gpu1 , gpu2 ", ["gpu1", "gpu2"]),
    ],
)
def test_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a,", "gpu[", "gpu[1", "gpu]1", "gpu[]", "gpu[x]", "gpu[3-1]", "gpu[1-2-3]"])
def test_not_a_host_list(text: str) -> None:
    with pytest.raises(ValueError, match="is no host list"):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("4(x2)", [4, 4]), ("4(x2),3", [4, 4, 3]), ("1,2,1", [1, 2, 1])]
)
def test_counts(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "4(2)", "4(x2", "4,,3"])
def test_not_counts(text: str) -> None:
    with pytest.raises(ValueError, match="is no list of task counts"):
        expand_counts(text)

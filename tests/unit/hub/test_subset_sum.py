"""Exact sums of whole groups, against every subset."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from atropos_core.hub.subset_sum import earliest, largest, multiples, reachable

sizes = st.lists(st.integers(1, 9), max_size=9)


def sums(some: list[int]) -> set[int]:
    return {sum(chosen) for n in range(len(some) + 1) for chosen in combinations(some, n)}


@given(sizes, st.integers(1, 40))
def test_reachable_is_every_sum_up_to_the_bound(some, bound):
    bits = reachable(Counter(some), bound)
    assert {s for s in range(bits.bit_length()) if bits >> s & 1} == {s for s in sums(some) if s <= bound}
    assert largest(bits, bound) == max(s for s in sums(some) if s <= bound)


@given(sizes, st.integers(0, 40))
def test_the_earliest_groups_add_up_exactly_and_none_lies_beyond_the_shortest_run_that_can(some, total):
    if total not in sums(some):
        return
    positions = earliest(iter(some), total)
    assert sum(some[place] for place in positions) == total
    assert positions == sorted(set(positions))
    shortest = next(n for n in range(len(some) + 1) if total in sums(some[:n]))
    assert all(place < shortest for place in positions)


@given(st.sets(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 30))
def test_multiples_knows_what_no_number_of_groups_can_add_up_to(some, total):
    can = {0}
    for _ in range(total):
        can |= {a + b for a in can for b in some if a + b <= total}
    assert multiples(some, total) == (total in can)

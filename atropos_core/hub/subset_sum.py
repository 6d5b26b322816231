"""Whole groups that add up to an exact number of sequences, the earliest ones preferred."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def reachable(counts: Mapping[int, int], bound: int) -> int:
    """Return bits: bit s is set if groups can add up to s, given how many there are of each size. Takes a few shifts per size,
    whatever the number of groups."""
    mask, bits = (1 << (bound + 1)) - 1, 1
    for size, count in counts.items():
        count = min(count, bound // size)
        taken = 1
        while count > 0:  # 1, 2, 4 ... copies at once: every number of copies is a sum of these
            taken = min(taken, count)
            bits |= (bits << size * taken) & mask
            count -= taken
            taken *= 2
    return bits


def largest(bits: int, bound: int) -> int:
    """Return the largest sum in `bits` that is at most `bound`."""
    return (bits & ((1 << (bound + 1)) - 1)).bit_length() - 1


def multiples(sizes: Iterable[int], total: int) -> bool:
    """True if groups of these sizes, any number of each, could add up to `total`."""
    return bool(reachable(dict.fromkeys(sizes, total), total) >> total & 1)


def earliest(sizes: Iterable[int], total: int) -> list[int]:
    """Return indices of items that add up to `total`, from the shortest prefix that has such items; within it, earlier items are
    preferred. There must be such a sum."""
    if total == 0:
        return []
    mask, bits = (1 << (total + 1)) - 1, 1
    kept: list[tuple[int, int, int]] = []  # place, size, the sums before it
    useless: set[int] = set()  # sizes that added no sum since the last one that did
    for place, size in enumerate(sizes):
        if size in useless:
            continue
        more = bits | (bits << size) & mask
        if more == bits:
            useless.add(size)
            continue
        useless.clear()
        kept.append((place, size, bits))
        bits = more
        if bits >> total & 1:
            break
    chosen = []
    for place, size, before in reversed(kept):
        if not before >> total & 1:
            chosen.append(place)
            total -= size
    assert total == 0, "the caller knows that there is a sum"
    return chosen[::-1]

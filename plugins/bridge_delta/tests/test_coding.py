"""Blocks and whole updates as bytes: bit for bit, and no longer than what they tell."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from atropos_bridge_delta import coding, update_file
from atropos_bridge_delta.coding import BLOCK, changed_bytes
from atropos_bridge_delta.tensors import bits, digest
from atropos_core.errors import DataError


def changed(size: int, elements: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Bits of even chance, and the same with about that share of them changed to others of even chance: nothing to compress."""
    draw = np.random.default_rng([size, elements, int(1e6 * share)])
    old = np.frombuffer(draw.bytes(elements * size), f"<i{size}")
    where = draw.random(elements) < share
    where[elements // 2] = True
    new = old.copy()
    new[where] ^= np.frombuffer(draw.bytes(int(where.sum()) * size), f"<i{size}") | 1
    return old, new


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("elements", [1, 1000, 1_000_000])
@pytest.mark.parametrize("share", [0.0, 1e-5, 1e-4, 1e-3, 0.01, 0.045, 0.2, 0.5, 0.8, 0.95, 0.99, 1.0])
def test_a_block_is_read_back_bit_for_bit_and_takes_what_theory_says(size: int, elements: int, share: float) -> None:
    old, new = changed(size, elements, share)
    count, coded = coding.encode(old, new)
    assert count == int((old != new).sum())
    found = coding.decode(memoryview(coded), elements, size)
    again = old.copy()
    again[slice(None) if found.positions is None else found.positions] = found.values
    assert np.array_equal(again, new)
    assert (
        len(coded) <= 1.10 * changed_bytes(elements, count, size) + 32
    )  # a block of some changes has a head, and short codes


def test_what_theory_says_is_the_number_of_subsets_and_the_values() -> None:
    assert changed_bytes(8, 2, 4) == pytest.approx(np.log2(28) / 8 + 8)
    assert changed_bytes(5, 5, 2) == pytest.approx(10)
    assert coding.encode(np.zeros(9, np.int16), np.zeros(9, np.int16)) == (0, b"")


def test_zero_with_a_sign_and_each_nan_are_what_they_are() -> None:
    old = torch.tensor([0.0, 1.0, float("nan"), 2.0])
    new = torch.tensor([-0.0, 1.0, float("nan"), float("nan")])
    bits(new)[2] += 1  # another NaN
    count, coded = coding.encode(bits(old).numpy(), bits(new).numpy())
    assert count == 3
    bits(old).numpy()[coding.decode(memoryview(coded), 4, 4).positions] = coding.decode(memoryview(coded), 4, 4).values
    assert torch.equal(bits(old), bits(new))
    same = torch.full((5,), float("nan"), dtype=torch.bfloat16)
    assert coding.encode(bits(same).numpy(), bits(same.clone()).numpy()) == (0, b"")


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(BLOCK + 1000, generator=generator).bfloat16(),  # two blocks
        torch.randn(3, 5, generator=generator),
        torch.randn(100, 7, generator=generator).bfloat16(),
        torch.tensor(3, dtype=torch.int64),
    ]


def test_an_update_makes_old_tensors_into_new_ones_and_nothing_else_changes() -> None:
    theirs, ours = tensors(), [one.clone() for one in tensors()]
    now = [one.clone() for one in ours]
    now[0][[5, BLOCK - 1, BLOCK, BLOCK + 999]] = 9.0
    now[1] += 1.0
    writer = update_file.Writer(file := io.BytesIO())
    for number, (old, new) in enumerate(zip(ours, now, strict=True)):
        writer.changes(number, bits(old), bits(new))
    assert writer.changed == 4 + 15
    assert (
        update_file.digest_of(file) == (writer.size_bytes, writer.digest()) == (len(file.getvalue()), writer.digest())
    )
    assert digest(map(bits, ours)) == digest(map(bits, now)) != digest(map(bits, theirs))
    update_file.apply(file, [bits(one) for one in theirs])
    assert digest(map(bits, theirs)) == digest(map(bits, now))

    writer = update_file.Writer(file := io.BytesIO())
    for number, one in enumerate(now):
        writer.whole(number, bits(one))
    anew = [torch.zeros_like(one) for one in now]
    update_file.apply(file, [bits(one) for one in anew])
    assert digest(map(bits, anew)) == digest(map(bits, now))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: b"something else" + data, "no update of bridge 'delta'"),
        (lambda data: data[:-1], "ends within a block"),
        (lambda data: data + bytes([9, 0, 1, 0]), "tensor 9, and there is none"),
        (lambda data: data + bytes([3, 1, 1, 0]), "block 1 of tensor 3"),
        (lambda data: data + bytes([1, 0, 3, 1, 99, 0]), "says 99 changes"),
        (lambda data: data + bytes([1, 0, 4, 1, 1, 2, 99]), "a change at 99"),
        (lambda data: data + bytes([1, 0, 4, 1, 1, 3, 255]), "cannot be decoded"),
        (lambda data: data + bytes([1, 0, 2, 1, 1]), "bytes are to follow"),
    ],
)
def test_what_is_no_update_is_refused_by_what_is_wrong_with_it(spoil: object, says: str) -> None:
    writer = update_file.Writer(file := io.BytesIO())
    writer.whole(1, bits(tensors()[1]))
    with pytest.raises(DataError, match=says):
        update_file.apply(io.BytesIO(spoil(file.getvalue())), [bits(one) for one in tensors()])  # type: ignore[operator]

"""A NumberList behaves like a list to SkyRL, and like an array to numpy and torch."""

from __future__ import annotations

import copy
import pickle
from operator import add

import numpy as np
import pytest

from atropos_adapter_skyrl.number_list import NumberList

NUMBERS = {
    "ids": np.array([5, 0, 149_000, 5], np.int32),
    "mask": np.array([1, 0, 1], np.int8),
    "a mask of no tokens": np.array([0, 0], np.int8),
    "one": np.array([0], np.int8),
    "empty": np.array([], np.int32),
}
DONE = {
    "list": list, "len": len, "sum": sum, "truth": bool, "any": any, "all": all, "sorted": sorted,
    "after a list": lambda one: add([3] * 2, one), "twice after a list": lambda one: add(add([], one), one),
    "before a list": lambda one: add(one, [9]), "slice": lambda one: list(one[1:]), "copy": lambda one: list(one.copy()),
    "reversed": lambda one: list(reversed(one)), "in": lambda one: (0 in one, 7 in one),
    "repeated": lambda one: one * 2, "repeated, the other way": lambda one: 2 * one,
    "equal": lambda one: (one == list(one), one == [1], one == (), one == 5),
    "unequal": lambda one: (one != list(one), one != [1], one != (), one != 5),
    "maximum": lambda one: max(one, default=None), "extended": lambda one: (made := [1]).extend(one) or made,
    "zipped": lambda one: list(zip(one, one, strict=True)), "index": lambda one: [one[at] for at in range(len(one))],
    "a list of them": lambda one: [one] == [list(one)], "pickled": lambda one: list(pickle.loads(pickle.dumps(one))),
    "deep copy": lambda one: list(copy.deepcopy(one)),
}  # fmt: skip


@pytest.mark.parametrize("what", DONE)
@pytest.mark.parametrize("name", NUMBERS)
def test_python_sees_the_list_of_its_numbers(name, what):
    array = NUMBERS[name]
    found, wanted = DONE[what](NumberList.of(array)), DONE[what](array.tolist())
    assert found == wanted and repr(found) == repr(wanted)


@pytest.mark.parametrize("name", NUMBERS)
def test_numpy_sees_the_array_and_nothing_is_copied(name):
    array = NUMBERS[name]
    made = NumberList.of(array)
    assert np.shares_memory(made, array) or not len(array)
    assert type(np.asarray(made)) is np.ndarray and np.asarray(made).tobytes() == array.tobytes()
    target = np.zeros((2, len(array)), array.dtype)
    target[1, :] = made
    assert target[1].tobytes() == array.tobytes()
    together = np.concatenate([made, made])
    assert together.tobytes() == 2 * array.tobytes() and together.sum() == 2 * array.sum()


def test_joining_two_of_them_joins_and_never_adds():
    ids = NumberList.of(NUMBERS["ids"])
    assert ids + ids == [5, 0, 149_000, 5] * 2
    again, other = NumberList.of(NUMBERS["ids"].copy()), NumberList.of(NUMBERS["mask"])
    assert (ids == again, ids != again, ids == other, ids != other) == (True, False, False, True)
    with pytest.raises(TypeError):
        ids + 1
    with pytest.raises(TypeError):
        hash(ids)


def test_a_view_of_a_message_cannot_be_changed():
    ids = NumberList.of(np.frombuffer(bytes(8), np.int32))
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1

"""Tensors of the protocol, dense or sparse, as arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import DataError
from atropos_tinker_api.wire import protobuf

MOST_ELEMENTS = 1 << 24  # of one tensor when it is dense: a sparse one names its shape, and that costs nothing to send
FLOAT32, INT64, INT32 = 1, 2, 3  # DType
_DTYPES: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}
_INT64 = np.dtype("<i8")
Array = NDArray[Any]


def read_tensor(data: memoryview, name: str) -> Array:
    """Return the tensor of a message as a dense array of one or two dimensions; what a sparse one leaves out is 0. Raises DataError,
    which calls it `name`."""
    dense: memoryview | None = None
    sparse: memoryview | None = None
    dtype, shape = 0, []
    for field in protobuf.fields(data):
        if field.tag == 1:
            dense, sparse = field.content(), None
        elif field.tag == 2:
            sparse, dense = field.content(), None
        elif field.tag == 3:
            dtype = field.integer()
        elif field.tag == 4:
            shape += field.integers()
            if len(shape) > 2:
                raise DataError(f"{name} has more than two dimensions.")
    if dtype not in _DTYPES:
        raise DataError(f"{name} has the unknown dtype {dtype}.")
    if any(size < 0 for size in shape) or math.prod(shape) > MOST_ELEMENTS:
        raise DataError(f"{name} has the shape {shape}: at most {MOST_ELEMENTS:,} elements are possible.")
    if sparse is not None:
        return _from_sparse(sparse, _DTYPES[dtype], shape, name)
    values = _array(dense if dense is not None else memoryview(b""), _DTYPES[dtype], name)
    if not shape:
        return values
    if math.prod(shape) != len(values):
        raise DataError(f"{name} has {len(values)} elements, which do not fill its shape {shape}.")
    return values.reshape(shape)


def _from_sparse(data: memoryview, dtype: np.dtype[Any], shape: list[int], name: str) -> Array:
    """Return the dense array of a message SparseCsr: `crow` says where each row begins in `values` and `columns`."""
    parts = {field.tag: field.content() for field in protobuf.fields(data)}
    values, crow, columns = (
        _array(parts.get(tag, memoryview(b"")), kind, name) for tag, kind in ((1, dtype), (2, _INT64), (3, _INT64))
    )
    if len(shape) != 2:
        raise DataError(f"{name} is sparse and has the shape {shape}: a sparse tensor has two dimensions.")
    rows, width = shape
    if (
        len(crow) != rows + 1
        or crow[0] != 0
        or crow[-1] != len(values)
        or len(columns) != len(values)
        or (np.diff(crow) < 0).any()
        or (len(columns) and (columns.min() < 0 or columns.max() >= width))
    ):
        raise DataError(f"{name} is sparse, and its indices do not fit its shape {shape} and its {len(values)} values.")
    out = np.zeros(shape, dtype)
    out[np.repeat(np.arange(rows), np.diff(crow)), columns] = values
    return out


def _array(data: memoryview, dtype: np.dtype[Any], name: str) -> Array:
    if len(data) % dtype.itemsize:
        raise DataError(f"{name} has {len(data)} bytes, which are not a whole number of {dtype.name} values.")
    return np.frombuffer(data, dtype)

"""A device on a CPU that counts what would make the host wait for a GPU.

Its tensors report another device than "cpu", so code takes the way that it takes on a GPU, and numbers are those of the CPU. The
host waits where a value comes back to it: a copy to the host, `.item()`, a result whose shape depends on values; and where it uploads
without `non_blocking`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "meta"  # what its tensors say of themselves: torch knows this device without a GPU
aten = torch.ops.aten
SHAPED_BY_VALUES = {
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default,
    aten.bincount.default, aten.repeat_interleave.Tensor,
}  # fmt: skip
VALUES = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default}
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class Counted(torch.Tensor):
    """A tensor of the device; `inner` has its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Counted:
        made: Counted = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=NAME,
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside `counting`")


class Counting(TorchDispatchMode):
    """Runs what is called on the device, and counts what the host would wait for, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        with self:  # inference mode passes composite operations on as they are
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        flat = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        on_device = any(isinstance(one, Counted) for one in flat)
        if wait := wait_of(func, args, kwargs):
            self.waits[wait] += 1
        elif on_device and func not in COPIES and any(not isinstance(one, Counted) and one.dim() for one in flat):
            raise AssertionError(f"{func} has tensors on the host and on the device")
        if (asked := kwargs.get("device")) is not None:
            on_device = torch.device(asked).type == NAME
            kwargs["device"] = torch.device("cpu")
        args, kwargs = tree_map_only(Counted, lambda one: one.inner, (args, kwargs))
        made = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, Counted, made) if on_device else made


def wait_of(func: Any, args: Any, kwargs: Any) -> str | None:
    """Return the name of what the host would wait for in this call; None if it would not."""
    there = any(isinstance(one, Counted) for one in tree_leaves((args, kwargs)))
    if func is aten._to_copy.default and (device := kwargs.get("device")) is not None:
        onto = torch.device(device).type == NAME
        if there and not onto:
            return "copy to the host"
        return "copy to the device" if onto and not there and not kwargs.get("non_blocking") else None
    if func is aten.copy_.default:
        ends = [isinstance(one, Counted) for one in args[:2]]
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return "copy between host and device" if ends[0] != ends[1] and (blocking or ends[1]) else None
    if func in VALUES or func in SHAPED_BY_VALUES:
        return str(func) if there else None
    if func in INDEXED and there and any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]):
        return f"{func} by a mask"
    return None


class Tape:
    """Stands for a CUDA graph on a CPU: repeats recorded operations on the same memory, and takes no branch again.

    As a graph, it refuses to record what the host would wait for. Unlike a graph, it also computes what it records."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def __call__(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        with Recording() as recording:
            made = function()
        self.recorded += 1

        def replay() -> torch.Tensor:
            self.replayed += 1
            again: dict[int, torch.Tensor] = {}
            for func, args, kwargs, results in recording.calls:
                given = tree_map_only(torch.Tensor, lambda one: again.get(id(one), one), (args, kwargs))
                new = func(*given[0], **given[1])
                for old, one in zip(tree_leaves(results), tree_leaves(new), strict=True):
                    if isinstance(old, torch.Tensor):
                        again[id(old)] = one
            return again[id(made)]

        return replay


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []  # which also keep every result, and with it its id
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        if func in VALUES or func in SHAPED_BY_VALUES or wait_of(func, args, kwargs):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        made = func(*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, self._fixed, (args, kwargs))
        self.calls.append((func, args, kwargs, made))
        self._made.update(id(one) for one in tree_leaves(made))
        return made

    def _fixed(self, one: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same memory that stays there: a graph does not know what a parameter is given later."""
        if id(one) in self._made or isinstance(one, Counted):
            return one
        with torch.inference_mode(one.is_inference()):
            return one.detach()


@contextmanager
def counting() -> Iterator[Counting]:
    with Counting() as mode:
        yield mode


@torch.inference_mode()  # its views could not be made there otherwise
def put(model: Any) -> None:
    """Move a model's tensors to the device."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not isinstance(tensor, Counted):
                    tensors[name] = Counted(tensor.detach())

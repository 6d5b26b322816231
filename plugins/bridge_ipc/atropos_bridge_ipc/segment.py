"""The two carriers of one flat segment of bytes: POSIX shared memory without a name, and CUDA IPC.

Either way the owner makes a segment and describes it (`handle`, and descriptors if it has any), and the other side
attaches to it. Neither leaves anything behind: a memfd has no name and ends with the last process that maps it. CUDA's
memory ends with its owner, and the file of reference counts that torch keeps for it is unlinked at once.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atropos_core.errors import FitError, WeightsMismatch
from atropos_core.interfaces import Transport

_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 0x2, 0x4  # linux/fcntl.h; Python names them from 3.12 on


@dataclass(frozen=True)
class Exported:
    """A new segment: `flat` uint8 [size], zeros; the rest is for the other side."""

    flat: torch.Tensor
    handle: dict[str, Any]
    identity: list[Any]  # what both sides must see
    descriptors: list[int]


def export(transport: Transport, size: int, device: torch.device) -> Exported:
    """Make a segment. Raises FitError if the device does not have this transport."""
    if (transport, device.type) not in (("posix_shm", "cpu"), ("cuda_ipc", "cuda")):
        raise FitError(
            f"bridge 'ipc' is to share weights by {transport}, and the engine's model is on {device}.",
            remedy="posix_shm shares weights on a CPU, cuda_ipc on a GPU: place trainer and engine on the same kind of device.",
        )
    return _export_posix(size) if transport == "posix_shm" else _export_cuda(size, device)


def attach(
    transport: Transport, handle: Mapping[str, Any], descriptors: Sequence[int]
) -> tuple[torch.Tensor, list[Any]]:
    """Return the flat segment and its identity. Closes the descriptors. Raises FitError if this process may not map it."""
    if transport == "cuda_ipc":
        return _attach_cuda(handle)
    try:
        (descriptor,) = descriptors
        return _map(descriptor)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


# -- POSIX


def _export_posix(size: int) -> Exported:
    descriptor = os.memfd_create("atropos-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        # No process can shorten it from here on: that would be a SIGBUS in any process that touches a weight.
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
        flat, identity = _map(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return Exported(flat, {}, identity, [descriptor])


def _map(descriptor: int) -> tuple[torch.Tensor, list[Any]]:
    state = os.fstat(descriptor)
    # The mapping lives as long as a tensor that looks into it.
    mapped = mmap.mmap(descriptor, state.st_size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(mapped, dtype=torch.uint8), [state.st_dev, state.st_ino]


# -- CUDA


def _export_cuda(size: int, device: torch.device) -> Exported:
    flat = torch.zeros(size, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    try:
        number, memory, length, offset, counter, counter_offset, event, sync = flat.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        raise FitError(
            f"bridge 'ipc' cannot export memory of {device}: {error}",
            remedy="Unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF: its memory has no IPC handle.",
        ) from error
    # Torch counts references in a named file and removes it only at an orderly exit; a process that is killed would
    # leave it. The other side does not need it: torch ignores its absence when a storage is released.
    name = counter.decode() if isinstance(counter, bytes) else str(counter)
    (Path("/dev/shm") / name.lstrip("/")).unlink(missing_ok=True)
    handle = {
        "device": number,
        "memory": memory,
        "bytes": length,
        "offset": offset,
        "counter": counter,
        "counter_offset": counter_offset,
        "event": event,
        "sync": bool(sync),
    }
    return Exported(flat, handle, [str(torch.cuda.get_device_properties(device).uuid)], [])


def _attach_cuda(handle: Mapping[str, Any]) -> tuple[torch.Tensor, list[Any]]:
    if not torch.cuda.is_available():
        raise WeightsMismatch(
            "the engine shares weights on a GPU, and the trainer's process sees none.",
            remedy="Place both on the same GPU.",
        )
    torch.cuda.init()
    fields = ("device", "memory", "bytes", "offset", "counter", "counter_offset", "event", "sync")
    try:
        storage = torch.UntypedStorage._new_shared_cuda(*(handle[field] for field in fields))
    except RuntimeError as error:
        raise FitError(
            f"CUDA does not let this process map the engine's memory: {error}",
            remedy="A container must be started with --ipc=host, and both processes must see the same GPU.",
        ) from error
    device = torch.device("cuda", handle["device"])
    flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    return flat, [str(torch.cuda.get_device_properties(device).uuid)]

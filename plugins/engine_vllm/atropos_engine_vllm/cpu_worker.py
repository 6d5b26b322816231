"""vLLM's worker on a CPU, with `enable_sleep_mode`: it gives the memory of keys and values back to the system.

vLLM has that for GPUs alone; its own worker on a CPU refuses `/release_kv_cache_memory`.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

_libc = ctypes.CDLL(None, use_errno=True)


class SleepingCPUWorker(CPUWorker):  # type: ignore[misc] # vLLM need not be installed where types are checked
    """Addresses stay; pages come back, as zeros, where something is written or read again."""

    def discard(self, tags: tuple[str, ...]) -> None:
        """vLLM calls it once nothing is in flight and no prefix is remembered, so that what is there will not be read again."""
        if tags != ("kv_cache",):
            raise ValueError(f"of the memory of a worker on a CPU only the KV cache can be given back, and not {tags}")
        storages = {cache.untyped_storage().data_ptr(): cache for cache in self.model_runner.kv_caches}
        for cache in storages.values():
            give_back(cache)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing is to do."""


def give_back(tensor: torch.Tensor) -> None:
    """Give the whole pages of a tensor's storage back to the system: they are zeros when they are read again, and memory when they
    are written. Raises OSError where the system does not take them."""
    storage = tensor.untyped_storage()
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if last <= first:
        return
    if _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(mmap.MADV_DONTNEED)):
        code = ctypes.get_errno()
        raise OSError(code, f"madvise of {last - first:,} bytes: {os.strerror(code)}")

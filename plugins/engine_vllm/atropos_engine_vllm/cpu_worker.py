"""vLLM's worker on a CPU with `enable_sleep_mode`: it returns the memory of keys and values to the system.

vLLM supports that only on GPUs; its own CPU worker refuses `/release_kv_cache_memory`.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

_libc = ctypes.CDLL(None, use_errno=True)


class SleepingCPUWorker(CPUWorker):  # type: ignore[misc] # vLLM need not be installed where types are checked
    """Addresses stay; pages come back, as zeros, when they are written or read again."""

    def discard(self, tags: tuple[str, ...]) -> None:
        """Free the memory. vLLM calls this once nothing is in flight and no prefix is cached, so the content will not be read again."""
        if tags != ("kv_cache",):
            raise ValueError(f"a worker on a CPU can free only the memory of the KV cache, not {tags}")
        storages = {cache.untyped_storage().data_ptr(): cache for cache in self.model_runner.kv_caches}
        for cache in storages.values():
            give_back(cache)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Do nothing: pages come back on access."""


def give_back(tensor: torch.Tensor) -> None:
    """Return the whole pages of a tensor's storage to the system. Reading them again gives zeros; writing takes memory. Raises
    OSError if the system refuses."""
    storage = tensor.untyped_storage()
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if last <= first:
        return
    if _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(mmap.MADV_DONTNEED)):
        code = ctypes.get_errno()
        raise OSError(code, f"madvise of {last - first:,} bytes: {os.strerror(code)}")

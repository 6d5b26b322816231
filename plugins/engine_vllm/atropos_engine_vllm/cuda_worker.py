"""vLLM's worker on a GPU with `enable_sleep_mode`, in which only keys and values sleep.

vLLM would also put the weights into the sleeping pool. CUDA IPC cannot share memory of that pool, and memory freed in it does not return to
the device. So weights that bridge `ipc` moves out of it would take their memory twice.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.v1.worker.gpu_worker import Worker


class SleepingCUDAWorker(Worker):  # type: ignore[misc] # vLLM need not be installed where types are checked
    """Keys and values keep their addresses while they sleep, so that CUDA graphs stay valid."""

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag != "kv_cache":
            return nullcontext()
        pool: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)
        return pool

"""A process group of torch.distributed: the trainer is rank 0 and sends, and the processes that hold an engine's weights receive.

It is separate from the default groups that trainer and engine may have. torch has no public way to make a second group between processes
that do not share a first one, so the classes of its backends are used directly.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from atropos_bridge_nccl import BROKE_OFF
from atropos_core.errors import AtroposError, FitError, WeightsMismatch
from atropos_torch_models.network import interface_of, own_address


class Group:
    """`where` is the bridge's: `host` and `port` of the trainer, `size`, `backend`, `number`, `deadline_s`. Each wait has that deadline."""

    def __init__(
        self, where: Mapping[str, Any], rank: int, device: torch.device, listening: socket.socket | None = None
    ) -> None:
        """Returns once all have joined and received rank 0's number. Rank 0 brings the listening socket. Raises FitError if they do not
        meet, WeightsMismatch if another run answers."""
        self._timeout = timedelta(seconds=where["deadline_s"])
        self.device = device if where["backend"] == "nccl" else torch.device("cpu")
        try:
            self._group = self._meet(where, rank, listening)
            if rank == 0:
                self.tell(where["number"])
            else:
                self.expect(where["number"], "meets")
        except WeightsMismatch:
            raise
        except (RuntimeError, AtroposError) as error:  # NCCL looks at the devices only in the first broadcast
            at = f"{where['host']}:{where['port']} over {where['backend']}"
            raise FitError(
                f"rank {rank} of {where['size']} cannot join the others at {at}: {error}",
                remedy="Each process must reach the trainer's machine and the other engines', and on a GPU have one of its own. Or use "
                "--bridge checkpoint, or on one machine --bridge ipc.",
            ) from error

    def tell(self, number: int) -> None:
        self.broadcast(torch.tensor([number], dtype=torch.int64, device=self.device))

    def expect(self, number: int, what: str) -> None:
        """Raises WeightsMismatch if the trainer has sent another number."""
        self.broadcast(told := torch.zeros(1, dtype=torch.int64, device=self.device))
        if int(told) != number:
            raise WeightsMismatch(
                f"the trainer {what} as {int(told)}, and this engine as {number}: they are not of one run."
            )

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's values to all ranks. `tensor` is contiguous, on `self.device`. Raises AtroposError if an end is gone or late."""
        options = c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            self._group.broadcast([tensor], options).wait(self._timeout)
        except RuntimeError as error:
            raise AtroposError(f"{BROKE_OFF}: {error}") from error

    def _meet(self, where: Mapping[str, Any], rank: int, listening: socket.socket | None) -> Any:
        host, port, size = where["host"], where["port"], where["size"]
        self._store = distributed.TCPStore(  # type: ignore[attr-defined] # nor this
            host, port, size, is_master=rank == 0, timeout=self._timeout, wait_for_workers=False,
            master_listen_fd=None if listening is None else listening.detach(),
        )  # fmt: skip
        own = host if rank == 0 else own_address(host, port)
        if where["backend"] == "nccl":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_of(own)}")
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return c10d.ProcessGroupNCCL(self._store, rank, size, options)
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # torch does not list it
        options._timeout = self._timeout
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=own)]
        return c10d.ProcessGroupGloo(self._store, rank, size, options)

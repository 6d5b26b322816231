"""Our weight-transfer engine, in each of vLLM's workers. It is vLLM's own for NCCL, but over the trainer's group. So it also works on a
CPU, and the trainer does not need vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from atropos_bridge_nccl.group import Group
from atropos_core.errors import WeightsMismatch
from atropos_torch_models.vllm_experts import pack_again


@dataclass
class Meeting(WeightTransferInitInfo):  # type: ignore[misc] # vLLM need not be installed where types are checked
    """The argument of `Group`, and the rank of the engine's first worker."""

    where: dict[str, Any]
    first_rank: int


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version that is sent, and name, dtype and shape of each tensor in order."""

    version: int
    tensors: list[list[Any]]


class Receiver(NCCLWeightTransferEngine):  # type: ignore[misc]
    """Receives whole tensors under their Hugging Face names; each worker takes its part of them, as from a checkpoint."""

    init_info_cls = Meeting
    update_info_cls = Update
    supports_draft_weight_update = False

    def init_transfer_engine(self, meeting: Meeting) -> None:
        self._loaded: set[str] = set()
        self._group = Group(meeting.where, meeting.first_rank + self.parallel_config.rank, self.device)

    def receive_weights(self, update: Update) -> None:
        self._group.expect(update.version, "sends")
        self._loaded = set(self.model.load_weights(self._arriving(update.tensors)))

    def finish_weight_update(self) -> None:
        """Raises WeightsMismatch unless every parameter was loaded."""
        super().finish_weight_update()
        pack_again(self.model)
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(
                    module
                )  # packs what is there now: a tied head keeps the old
        if self.vllm_config.quant_config is None:
            left = sorted({name for name, _ in self.model.named_parameters()} - self._loaded)
            if left:
                raise WeightsMismatch(
                    f"an update did not reach {left[0]!r} and {len(left) - 1} more of vLLM's parameters."
                )

    def shutdown(self) -> None:
        """The group ends with this process."""

    def _arriving(self, tensors: Sequence[Sequence[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in tensors:
            arrived = torch.empty(shape, dtype=getattr(torch, dtype), device=self._group.device)
            self._group.broadcast(arrived)
            yield name, arrived.to(self.device)

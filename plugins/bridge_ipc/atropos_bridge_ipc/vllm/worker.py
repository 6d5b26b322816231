"""Our weight-transfer engine, in each of vLLM's workers.

vLLM builds it after loading its model, and before anything is compiled, captured or profiled. The weights move into a
shared segment at that point, so that every address that vLLM learns is the one that the trainer writes to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from atropos_bridge_ipc import handles, segment, tensors
from atropos_bridge_ipc.manifest import PAGE, Manifest, Tensor, end, place
from atropos_bridge_ipc.vllm import angles, names
from atropos_bridge_ipc.vllm.regions import CannotShare, check_shareable, regions
from atropos_core.errors import AtroposError, FitError, WeightsMismatch
from atropos_core.interfaces import Transport
from atropos_torch_models.vllm_experts import pack_again

TRANSPORT = "ATROPOS_WEIGHT_TRANSPORT"  # environment: how weights reach this engine; "copy": nothing is to move


@dataclass
class TransferRequest(WeightTransferInitInfo):  # type: ignore[misc] # vLLM need not be installed where types are checked
    """A request of the bridge, and the file in which it expects the answer."""

    do: str  # "share", "attach", "write" or "read"
    directory: str
    file: str  # the answer's name, to which the rank is added
    nonce: str
    wanted: list[dict[str, Any]] = field(default_factory=list)  # share: the trainer's tensors
    source: str = ""  # attach: the trainer's handle file
    slot: int = 0  # write, read: a sentinel
    value: int = 0


@dataclass
class Version(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version that the trainer has written for copying."""

    version: int
    slot: int


class SharedWeights(WeightTransferEngine):  # type: ignore[misc]
    """Keep the model's parameters in a shared segment, or load copies of the trainer's if they cannot be shared."""

    init_info_cls = TransferRequest
    update_info_cls = Version
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._names = names.find()
        self._hash = handles.model_hash(Path(vllm_config.model_config.model))
        self._kept: segment.Exported | None = None
        self._placed: tuple[Tensor, ...] = ()
        self._source: tuple[torch.Tensor, Manifest] | None = None  # the trainer's segment, to copy from
        self._flat: torch.Tensor  # of these two, the one last agreed on
        self._loaded: set[str] | None = None  # during an update, vLLM's names of what was loaded
        self._needed = {name for name, _ in model.named_parameters()} if vllm_config.quant_config is None else set()
        self._transport: Transport = "cuda_ipc" if device.type == "cuda" else "posix_shm"
        self._reason = "it was set to copy" if os.environ.get(TRANSPORT) == "copy" else self._move()
        self._use_plain_products()

    def init_transfer_engine(self, request: TransferRequest) -> None:
        """Answer in a handle file, because a return value would not reach the bridge."""
        rank = self.parallel_config.rank
        path = Path(request.directory) / f"{request.file}.rank{rank}.json"
        answers = {"share": self._offer, "attach": self._attach, "write": self._write, "read": self._read}
        try:
            answer = answers[request.do](request)
        except AtroposError as error:
            answer = {"failed": str(error)}
        handles.write(path, request.nonce, self._hash, {"ranks": self.parallel_config.world_size, **answer})

    def start_weight_update(self) -> None:
        self._loaded = None
        self._names.begin_reload(self.model)

    def receive_weights(self, update: Version) -> None:
        """Load the trainer's tensors, under their Hugging Face names, as a checkpoint would be."""
        if self._source is None:
            raise WeightsMismatch("this engine was given no copy of the trainer's weights to load from.")
        flat, manifest = self._source
        found = int(flat[:PAGE].view(torch.int64)[update.slot])
        if found != update.version:
            raise WeightsMismatch(
                f"the trainer's copy holds version {found}, and version {update.version} is to be loaded."
            )
        self._loaded = set(self.model.load_weights(_views(flat, manifest)))

    def finish_weight_update(self) -> None:
        """Raises WeightsMismatch unless every parameter was loaded since the update began."""
        self._names.end_reload(self.model, self.model_config)
        pack_again(self.model)
        self._use_plain_products()
        if self._loaded is None:
            raise WeightsMismatch("a weight update was finished in which nothing was loaded: the publish was skipped.")
        if missing := sorted(self._needed - self._loaded):
            raise WeightsMismatch(
                f"a weight update did not reach {missing[0]!r} and {len(missing) - 1} more of vLLM's parameters."
            )

    def shutdown(self) -> None:
        """Release the trainer's memory. Our own segment stays, because it holds the model's weights."""
        self._source = None

    # -- one copy

    def _move(self) -> str:
        """Move every distinct parameter into one new segment. Returns the reason if that is impossible, else an empty text."""
        try:
            check_shareable(self.model, self.vllm_config, self.device, self._names)
            every = dict(self.model.named_parameters(remove_duplicate=False))
            described, _ = tensors.describe_tensors(every)
            self._placed = place(described)
            self._kept = tensors.move(
                every, self._placed, lambda: segment.export(self._transport, end(self._placed), self.device)
            )
        except (CannotShare, FitError) as error:
            return str(error)
        return ""

    def _offer(self, request: TransferRequest) -> dict[str, Any]:
        if self._kept is None:
            return {"impossible": self._reason}
        wanted = [Tensor.decoded(entry) for entry in request.wanted]
        by_name = {name: entry for entry in self._placed for name in entry.names}
        config = self.model_config.hf_config.get_text_config()
        try:
            found = regions(
                self.model, by_name, wanted, tied=bool(getattr(config, "tie_word_embeddings", False)), names=self._names
            )
        except CannotShare as error:
            return {"impossible": str(error)}
        self._flat = self._kept.flat
        return {
            "transport": self._transport,
            "manifest": Manifest(len(self._kept.flat), found, {}).encoded(),
            "rotary": angles.tables(self.model, self.vllm_config, self._names),
            "handle": self._kept.handle,
            "segment": self._kept.identity,
            "descriptor": self._kept.descriptors[0] if self._kept.descriptors else None,
        }

    def _write(self, request: TransferRequest) -> dict[str, Any]:
        self._sentinels()[request.slot] = request.value
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return {"value": request.value}

    def _read(self, request: TransferRequest) -> dict[str, Any]:
        return {"value": int(self._sentinels()[request.slot])}

    def _sentinels(self) -> torch.Tensor:
        return self._flat[:PAGE].view(torch.int64)

    # -- copies

    def _attach(self, request: TransferRequest) -> dict[str, Any]:
        path = Path(request.source)
        handle = handles.read(path, request.nonce, self._hash)
        descriptor = handles.open_descriptor(path, request.nonce, self._hash, handle)
        flat, identity = segment.attach("posix_shm", {}, [descriptor])
        self._source = (flat, Manifest.decoded(handle["manifest"]))
        self._flat = flat
        return {"segment": identity}

    # -- both

    def _use_plain_products(self) -> None:
        """On a CPU vLLM multiplies by a packed copy of some weights; have it use the weights themselves."""
        for module in self.model.modules():
            if hasattr(module, "cpu_linear") and type(getattr(module, "quant_method", None)) in (
                self._names.plain_linear_method,
                self._names.plain_embedding_method,
            ):
                module.cpu_linear = torch.nn.functional.linear


def _views(flat: torch.Tensor, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    for entry in manifest.tensors:
        yield entry.name, tensors.view(flat, entry)

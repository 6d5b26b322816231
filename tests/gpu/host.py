"""The program of a check's two processes: `python -m tests.gpu.host DESCRIPTOR ROLE`, spoken to as to any child.

It builds engine "hf" and trainer "grpo" without looking for plugins and without their option classes, because pluggy and
pydantic need not be installed where the checks run. The options here are the checks' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from atropos_core.errors import FitError
from atropos_core.processes import child_main as hosted
from atropos_core.processes.extension import Extension
from tests.gpu.models import SMALL, large

ENGINE = {
    "dtype": "auto",
    "max_batch": 64,
    "prefill_tokens": 4096,
    "kv_cache_gb": 2.0,
    "quantization": None,
    "decode": "auto",
    "cuda_graphs": False,
}
TRAINER = {
    "dtype": "auto", "loss": "grpo", "average": None, "clip_low": None, "clip_high": None, "dual_clip": None,
    "loss_length": None, "correction": None, "kl": None, "distillation": None, "entropy_coefficient": 0.0, "whiten_advantages": False,
    "old_logprobs": "rollout", "missing_logprobs": "refuse", "epochs": 1, "minibatches": 1,
    "tokens_per_microbatch": 16384, "logprob_chunk": 8192,
    "layout": "auto", "router_replay": False, "share_prompts": True, "attention": "padded", "gradient_checkpointing": False,
    "checkpointed_layers": None,
    "activation_offloading": False, "optimizer_offloading": False, "kernels": "torch",
    "compile_layers": False, "optimizer": "adamw",
    "learning_rate": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8,
    "weight_decay": 0.0, "max_grad_norm": 1.0, "warmup_steps": 0, "schedule": "constant", "schedule_floor": 0.0,
    "learning_rates": (), "lora": None, "sapo": None, "vespo": None, "kpop": None, "dppo": None, "loss_values": {},
    "adapts": lambda transports: False,  # whole models are trained here
}  # fmt: skip


class Holder:
    """A trainer with no optimiser, so that its memory holds weights alone."""

    def __init__(self, options: SimpleNamespace, context: SimpleNamespace) -> None:
        from atropos_trainer_grpo.model import open_model

        self.model = open_model(context.model, dtype=options.dtype, device=context.devices[0], with_weights=False)

    def weights_moved(self) -> None:
        from atropos_trainer_grpo.model import complete

        complete(self.model)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """A write into every parameter; the kernels may still run when this returns."""
        for parameter in self.model.parameters():
            parameter.mul_(factor)


class Graph:
    """One forward pass of the engine's model: captured as a CUDA graph, and run eagerly. A CPU has no graphs: there
    `replay` runs the pass anew."""

    def __init__(self, model: Any, tokens: int) -> None:
        device, dtype = model.device, model.dtype
        self._model = model
        self._inputs = {
            "input_ids": torch.arange(3, 3 + tokens, device=device)[None],
            "position_ids": torch.arange(tokens, device=device)[None],
            # A mask of its own: the model then decides nothing by looking at values, which a capture does not allow.
            "attention_mask": torch.full((tokens, tokens), torch.finfo(dtype).min, dtype=dtype, device=device).triu(1)[
                None, None
            ],
        }
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._capture()

    @torch.no_grad()
    def eager(self) -> torch.Tensor:
        logits: torch.Tensor = self._model(**self._inputs, use_cache=False).logits
        return logits

    def replay(self) -> torch.Tensor:
        if self._graph is None:
            return self.eager()
        self._graph.replay()
        return self._out

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # as torch asks: what is made lazily must be there before the capture
            for _ in range(3):
                self.eager()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = self.eager()


class CheckHost(hosted.Host):
    """One engine, trainer or holder."""

    async def build(self, wanted: Mapping[str, Any]) -> None:
        given = wanted["context"]
        context = SimpleNamespace(**{**given, "directory": Path(given["directory"]), "model": Path(given["model"])})
        if wanted["kind"] == "engine":
            from atropos_engine_hf.engine import HFEngine

            engine: Any = HFEngine(SimpleNamespace(**ENGINE | wanted["options"]), context)  # type: ignore[arg-type]
            self.offer("engine", engine)
        elif wanted["kind"] == "trainer":
            from atropos_trainer_grpo.trainer import GrpoTrainer

            trainer: Any = GrpoTrainer(SimpleNamespace(**TRAINER | wanted["options"]), context)  # type: ignore[arg-type]
            self.offer("trainer", trainer)
        self._wanted, self._context = wanted, context
        own = (
            self.warm,
            self.open_holder,
            self.scale,
            self.addresses,
            self.graph,
            self.eager,
            self.replay,
            self.refuse,
        )
        self.peer.handlers |= {handler.__name__: handler for handler in own}

    async def load_extension(self, reference: str) -> None:
        module, _, name = reference.partition(":")
        self._extension = Extension(getattr(import_module(module), name)(self.component))

    async def warm(self) -> None:
        """Take what a process takes before it has a model: modules, a CUDA context, kernels, workspaces."""
        from transformers import AutoModelForCausalLM

        for config in (SMALL, large(1e6)):
            with torch.device(self._context.devices[0]), torch.no_grad():
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
                model(input_ids=torch.zeros(2, 7, dtype=torch.int64))
            del model
        if self._context.devices[0] != "cpu":
            torch.cuda.empty_cache()

    async def open_holder(self) -> None:
        self.component = Holder(SimpleNamespace(**TRAINER | self._wanted["options"]), self._context)

    async def scale(self, factor: float) -> None:
        self.component.scale(factor)

    async def addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self.component.model.parameters()]

    async def graph(self, tokens: int) -> None:
        self._graph = Graph(self.component.model, tokens)

    async def eager(self) -> Any:
        return self._graph.eager().float().cpu().numpy()

    async def replay(self) -> Any:
        return self._graph.replay().float().cpu().numpy()

    async def refuse(self) -> str:
        """Open memory that this very process exported, which CUDA refuses as it does in a container that permits no
        IPC. On a CPU the export itself is refused. Returns the FitError, or nothing."""
        from atropos_bridge_ipc import segment

        try:
            exported = segment.export("cuda_ipc", 1 << 21, torch.device(self._context.devices[0]))
            segment.attach("cuda_ipc", exported.handle, [])
        except FitError as error:
            return str(error)
        return ""


if __name__ == "__main__":
    hosted.main(CheckHost)

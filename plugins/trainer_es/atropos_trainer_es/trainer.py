"""The trainer `es`: each step of the run samples from one member of a generation, and the last one moves the policy.

Version 0 is the policy itself. A step records the reward of the member that its rollouts were sampled from, and writes the next one:
policy + sigma x noise and policy - sigma x noise of each pair in turn. After the last member the policy moves by
learning_rate / population x sum of fitness x noise (arXiv 2509.24372, algorithm 1; antithetic pairs as in arXiv 1703.03864). The noise
is drawn again from its seeds, and the engines sample from the policy itself once more.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from atropos_core.errors import CheckpointError, ConfigError, DataError
from atropos_core.health.alignment import compare
from atropos_core.interfaces import ModelInfo, Trainer, Writing
from atropos_core.rollouts.tokenizer import fingerprint
from atropos_core.storage.checkpoint import AS_WRITTEN, taking_up
from atropos_core.types import Batch, Floats, Metrics, Tokens
from atropos_torch_models import tokenizer_files
from atropos_torch_models.cpu_warmup import warm_up
from atropos_torch_models.devices import refuse_missing
from atropos_torch_models.rounding import measured_rounding
from atropos_trainer_es.generation import fitness_of, noise, reward_of

if TYPE_CHECKING:
    from atropos_core.plugins.provider import RunContext
    from atropos_trainer_es.config import EsOptions

DRAWN = (
    "trainer.parameters",
    "trainer.population",
    "trainer.sigma",
    "seed",
)  # what says which members a generation has
CENTRE = "centre.safetensors"  # in float32, and where in a generation it is


class EsTrainer(Trainer):
    """`model` holds the member that engines sample from; `_centre`, in float32, the policy."""

    model: Any  # transformers' own classes are typed in part

    def __init__(self, options: EsOptions, context: RunContext) -> None:
        self._options = options
        self._context = context
        self._generation = 0
        self._rewards: list[float] = []  # of this generation's members so far
        self._member = 0  # that engines sample from: 0 is the policy itself

    async def open(self) -> ModelInfo:
        return await asyncio.to_thread(self._open)

    async def step(self, batch: Batch, writing: Writing) -> Metrics:
        sampled = batch.policy_version[batch.sampled]
        if others := sorted(set(sampled.tolist()) - {batch.version - 1}):
            raise DataError(f"trainer 'es' was given tokens of versions {others} for {batch.version - 1}.")
        reward = reward_of(batch)
        spans = list(zip(batch.offsets[:-1], batch.offsets[1:], batch.temperature.tolist(), strict=True))
        recomputed = np.concatenate([(await self.logprobs([batch.tokens[a:b]], heat))[0] for a, b, heat in spans])
        metrics = {"es/member": float(self._member), "es/reward": reward, "es/generation": float(self._generation)}
        self._rewards += [reward] if self._member else []
        ended = self._member == self._options.population
        moved = await asyncio.to_thread(self._moved) if ended else None
        async with writing():
            if moved is not None:
                self._centre, length = moved
                metrics |= {"es/update_norm": length, "es/reward_std": float(np.std(self._rewards))}
                self._generation, self._rewards = self._generation + 1, []
            self._member = 0 if ended else self._member + 1
            await asyncio.to_thread(self._write)
        return metrics | compare(batch, recomputed, batch.sampled, batch.sampled)

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        return await asyncio.to_thread(lambda: [self._logprobs(one, temperature or 1.0) for one in sequences])

    async def rounding(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> float | None:
        return await measured_rounding(self.model, lambda: self.logprobs(sequences, temperature))

    async def save(self, directory: Path) -> None:
        """Save the policy itself as a model directory, not the member that engines sample from."""
        await asyncio.to_thread(self._save, directory)

    async def restore(self, directory: Path) -> None:
        await asyncio.to_thread(self._restore, directory)

    def _open(self) -> ModelInfo:
        if self._context.threads:
            torch.set_num_threads(self._context.threads)
        device = self._context.devices[0]
        refuse_missing(device, "trainer 'es'")
        warm_up()
        dtype: Any = torch.float32 if torch.device(device).type == "cpu" else "auto"
        causal: Any = AutoModelForCausalLM
        self.model = causal.from_pretrained(self._context.model, dtype=dtype, trust_remote_code=False).to(device).eval()
        self.model.requires_grad_(False)
        pattern = re.compile(self._options.parameters)
        named = dict(self.model.named_parameters())
        self._centre = {name: one.float().clone() for name, one in named.items() if pattern.search(name)}
        if not self._centre:
            raise ConfigError(
                f"trainer.parameters = {pattern.pattern!r} is found in no parameter's name.",
                remedy=f"They are {', '.join(named)}"[:600],
            )
        return ModelInfo(
            architecture=type(self.model).__name__,
            parameters=sum(one.numel() for one in named.values()),
            vocabulary=int(self.model.config.vocab_size),
            dtype=str(next(iter(named.values())).dtype).removeprefix("torch."),
            device=device,
            tokenizer=fingerprint(self._context.model),
            threads=torch.get_num_threads(),
        )

    def _noise_of(self, pair: int) -> Any:
        return noise(self._centre, (self._context.seed, self._generation, pair))

    def _write(self) -> None:
        """Write the member into the model's parameters, in place."""
        present = dict(self.model.named_parameters())
        pair, second = divmod(self._member - 1, 2)
        scale = self._options.sigma * (-1) ** second
        for name, drawn in self._noise_of(pair).items() if self._member else self._centre.items():
            present[name].copy_(self._centre[name] + scale * drawn if self._member else drawn)

    def _moved(self) -> tuple[dict[str, torch.Tensor], float]:
        """Return the policy after this generation, and its distance from the previous one."""
        fitness = fitness_of(self._rewards, self._options.fitness)
        step = {name: torch.zeros_like(value) for name, value in self._centre.items()}
        for pair, (plus, minus) in enumerate(fitness.reshape(-1, 2)):
            for name, drawn in self._noise_of(pair).items():
                step[name].add_(drawn, alpha=float(plus - minus))
        rate = self._options.learning_rate / self._options.population
        length = float(torch.stack([one.square().sum() for one in step.values()]).sum().sqrt()) * rate
        return {name: value + rate * step[name] for name, value in self._centre.items()}, length

    @torch.no_grad()
    def _logprobs(self, tokens: Tokens, temperature: float) -> Floats:
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self._context.devices[0])[None]
        logits = self.model(ids).logits[0, :-1].float() / temperature
        found = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return np.concatenate([np.zeros(1, np.float32), found.cpu().numpy()])

    def _save(self, directory: Path) -> None:
        member, self._member = self._member, 0
        self._write()  # only a bridge reads this model, and never while it is saved
        self.model.save_pretrained(directory)
        self._member = member
        self._write()
        drawn = {name: self._setting(name) for name in DRAWN}
        state = {"generation": self._generation, "member": self._member, "rewards": self._rewards, "options": drawn}
        save_file(self._centre, directory / CENTRE, metadata={"state": json.dumps(state)})
        tokenizer_files.copy(self._context.model, directory)

    def _restore(self, directory: Path) -> None:
        with taking_up(f"the trainer's state in {directory / CENTRE}"):
            try:
                with safe_open(directory / CENTRE, "pt", device=self._context.devices[0]) as file:
                    state = json.loads(file.metadata()["state"])
                    centre = {name: file.get_tensor(name) for name in self._centre}
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"the trainer's checkpoint in {directory} cannot be read: {error}.", remedy=AS_WRITTEN
                ) from error
            names = DRAWN if state["member"] else DRAWN[:1]  # between two generations the others may change
            self._refuse_other_options(directory, {name: state["options"][name] for name in names})
            generation, member, rewards = state["generation"], state["member"], state["rewards"]
            if (
                not type(generation) is type(member) is int
                or generation < 0
                or not 0 <= member <= self._options.population
            ):
                raise ValueError(f"it is at member {member!r:.100} of generation {generation!r:.100}")
            if len(rewards) != max(member - 1, 0) or not all(
                type(one) is float and math.isfinite(one) for one in rewards
            ):
                raise ValueError(f"its rewards at member {member} are {rewards!r:.100}")
            for name, one in self._centre.items():
                if (centre[name].shape, centre[name].dtype) != (one.shape, one.dtype):
                    raise ValueError(
                        f"{name!r} is {centre[name].dtype} {list(centre[name].shape)}, and the model's {one.dtype} {list(one.shape)}"
                    )
        self._centre = centre
        self._generation, self._member, self._rewards = generation, member, rewards
        self._write()

    def _setting(self, name: str) -> Any:
        return self._context.seed if name == "seed" else getattr(self._options, name.removeprefix("trainer."))

    def _refuse_other_options(self, directory: Path, saved: Mapping[str, Any]) -> None:
        for name, value in saved.items():
            if value != (given := self._setting(name)):
                raise CheckpointError(
                    f"the checkpoint in {directory} is of {name} = {value!r}, not {given!r}: the members of its generation would "
                    "not be those that were rewarded.",
                    remedy="Resume with the one that it was saved with.",
                )

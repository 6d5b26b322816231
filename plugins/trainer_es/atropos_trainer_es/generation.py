"""The arithmetic of a generation: noise from seeds, fitness from rewards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from atropos_core.errors import DataError
from atropos_core.types import Batch


def noise(centre: Mapping[str, Tensor], seed: Sequence[int]) -> Mapping[str, Tensor]:
    """Standard normal numbers for each parameter, the same for the same seed wherever they are drawn: on a CPU."""
    state = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1)
    generator = torch.Generator().manual_seed(state)
    return {name: torch.randn(one.shape, generator=generator).to(one.device) for name, one in centre.items()}


def reward_of(batch: Batch) -> float:
    """Return the mean reward over episodes: `advantages` under a transform without a baseline. Each episode counts once, whether it
    is one sequence or several. Raises DataError if no token is trained."""
    of_episode: defaultdict[int, list[float]] = defaultdict(list)
    for start, end, episode in zip(batch.offsets[:-1], batch.offsets[1:], batch.episode.tolist(), strict=True):
        row = batch.advantages[start:end][batch.trained[start:end]]
        if len(row):
            of_episode[episode].append(float(row.mean(dtype=np.float64)))
    if not of_episode:
        raise DataError("trainer 'es' was given a batch of which no token is trained: it has no reward.")
    return float(np.mean([np.mean(each) for each in of_episode.values()]))


def fitness_of(rewards: Sequence[float], kind: str) -> np.ndarray:
    """[P] with the mean 0. z: by the standard deviation over members ("Evolution Strategies at Scale", arXiv 2509.24372).
    rank: -0.5 to 0.5 in equal steps, the same for equal rewards (Salimans et al., arXiv 1703.03864, section 2.1). All zero
    if all rewards are equal."""
    values = np.asarray(rewards, np.float64)
    if kind == "rank":
        below = (values[None] < values[:, None]).sum(1)
        upto = (values[None] <= values[:, None]).sum(1) - 1
        return np.asarray((below + upto) / 2 / (len(values) - 1) - 0.5)
    spread = values.std()
    return (values - values.mean()) / spread if spread > 1e-9 else np.zeros_like(values)

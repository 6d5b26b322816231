"""The metrics of a batch while it is trained: sums over tokens that stay on the device, and figures of each optimiser step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atropos_core.types import Metrics
from atropos_trainer_grpo.process_group import ProcessGroup

SUMS = (
    "ratio", "weight", "clipped", "correction", "corrected", "gap", "reference", "entropy", "k3", "distill", "mass",
    "kept_mass",
)  # fmt: skip
COUNTS = ("trained", "known", "taught", "cut", "kept", "single")


class Tally:
    def __init__(self) -> None:
        self.losses: list[float] = []  # of each optimiser step, as are norms and rates
        self.norms: list[float] = []
        self.rates: list[float] = []
        self.seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self.counts = dict.fromkeys(COUNTS, 0)
        self._sums: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value.detach() if name in self._sums else value.detach()

    def count_kept(self, sizes: NDArray[np.int64]) -> None:
        """Count trained tokens by how many tokens the sampler kept at their position; 0: it cut nothing."""
        self.counts["cut"] += int((sizes > 0).sum())
        self.counts["kept"] += int(sizes.sum())
        self.counts["single"] += int((sizes == 1).sum())

    def means(self, group: ProcessGroup, *, taught: bool) -> Metrics:
        """Return the metrics over all optimiser steps and ranks. `taught` is True if there is a teacher. Collective."""
        sums, seen = self._over_all_ranks(group)
        per = {name: max(count, 1) for name, count in seen.items()}
        metrics = {
            "loss": float(np.mean(self.losses)),
            "grad_norm": float(np.mean(self.norms)),
            "learning_rate": self.rates[-1],
            "ratio/mean": sums["ratio"] / per["trained"],
            "clip/fraction": sums.get("clipped", 0.0) / per["trained"],
            "entropy": sums["entropy"] / per["trained"],
            "kl/rollout_k3": sums["k3"] / per["known"],
        }
        if seen["cut"]:
            metrics |= {
                "truncation/share": seen["cut"] / per["trained"],
                "truncation/kept_tokens": seen["kept"] / seen["cut"],
                "truncation/kept_mass": sums["kept_mass"] / seen["cut"],
                "truncation/single_share": seen["single"] / seen["cut"],
            }
        if taught:
            metrics["distill/positions"] = seen["taught"] / per["trained"]
        for name, of, count in (
            ("ratio/weight", "weight", "trained"),
            ("kl/reference_k3", "reference", "trained"),
            ("distill/kl", "distill", "taught"),
            ("distill/coverage", "mass", "taught"),
            ("correction/mean", "correction", "trained"),
            ("correction/fraction", "corrected", "trained"),
            ("correction/gap", "gap", "known"),
        ):
            if of in sums:
                metrics[name] = sums[of] / per[count]
        return metrics

    def _over_all_ranks(self, group: ProcessGroup) -> tuple[dict[str, float], dict[str, int]]:
        """Return the sums that any rank has, and the counts."""
        own = {name: float(value) for name, value in self._sums.items()} | self.counts
        both = [[own.get(name, 0.0) for name in SUMS + COUNTS], [float(name in own) for name in SUMS + COUNTS]]
        values, present = group.sum(torch.tensor(both, dtype=torch.float64)).tolist()
        made = {name: value for name, value, here in zip(SUMS + COUNTS, values, present, strict=True) if here}
        return made, {name: int(made[name]) for name in COUNTS}

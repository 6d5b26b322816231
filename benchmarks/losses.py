"""Our losses beside TRL's own code, under the matching convention: value and gradient, in float64.

    make .venv-trl/stamp
    python -m benchmarks.losses [--cases 50]

Each row is a loss with options of ours, and the settings of TRL that mean the same. The largest differences over random
batches of 6 sequences are printed; beyond 1e-6 in value or 1e-5 in gradient a row does not hold, and this ends with 1.
Writes benchmarks/results/losses.json. Both sides leave out sequences without a trained token: TRL counts them in a mean over
sequences, and no batch of its own has one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atropos_core import console
from atropos_core.advantages import group_advantages
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.kl_estimators import divergence
from atropos_trainer_grpo.losses import LOSSES, Rows, token_weights
from atropos_trainer_grpo.update import clip_of
from benchmarks.machine import RESULTS, described

TRL = Path(".venv-trl/bin/python")
SEQUENCES, LONGEST, LENGTH = 6, 12, 16
VALUE, GRADIENT = 1e-6, 1e-5
Settings = dict[str, Any]

# ours: options of the trainer; TRL's: settings of its trainer. `on_policy`: old is new, where both mean the same.
ROWS: tuple[tuple[str, Settings, Settings], ...] = (
    ("GRPO", {"loss": "grpo"}, {"loss_type": "grpo"}),
    ("Dr.GRPO", {"loss": "dr_grpo", "loss_length": LENGTH}, {"loss_type": "dr_grpo", "max_completion_length": LENGTH}),
    ("DAPO", {"loss": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    ("GRPO, dual clip 3", {"loss": "grpo", "dual_clip": 3.0}, {"loss_type": "grpo", "delta": 3.0}),
    ("GSPO", {"loss": "gspo"}, {"loss_type": "grpo", "level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}),
    ("CISPO", {"loss": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    ("GRPO with k3", {"loss": "grpo", "kl": {"coefficient": 0.04}}, {"loss_type": "grpo", "beta": 0.04}),
    ("GRPO with k3_ratio", {"loss": "grpo", "kl": {"coefficient": 0.04, "estimator": "k3_ratio"}},
     {"loss_type": "grpo", "beta": 0.04, "bias_correction": True}),
    ("BNPO", {"loss": "grpo", "average": "token"}, {"loss_type": "bnpo"}),
    ("GSPO by TRL's defaults", {"loss": "gspo", "average": "token", "clip_low": 0.2, "clip_high": 0.2},
     {"loss_type": "dapo", "level": "sequence"}),
    ("DAPO with entropy", {"loss": "dapo", "entropy_coefficient": 0.01},
     {"loss_type": "dapo", "epsilon_high": 0.28, "entropy": 0.01}),
    ("SAPO", {"loss": "sapo"}, {"loss_type": "sapo"}),
    ("SAPO, other temperatures", {"loss": "sapo", "sapo": {"temperature_pos": 0.5, "temperature_neg": 2.0}},
     {"loss_type": "sapo", "sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0}),
    ("VESPO", {"loss": "vespo"}, {"loss_type": "vespo"}),
    ("VESPO, another kernel", {"loss": "vespo", "vespo": {"k_pos": 1.0, "lambda_pos": 0.5, "k_neg": 0.5, "lambda_neg": 0.2}},
     {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 0.5, "vespo_lambda_neg": 0.2}),
    ("LUSPO", {"loss": "luspo"}, {"loss_type": "luspo", "level": "sequence", "epsilon_low": 2e-3, "epsilon_high": 2.5e-3}),
    ("RLOO, on-policy", {"loss": "reinforce", "on_policy": True}, {"trainer": "rloo"}),
)  # fmt: skip


class Case:
    """Random columns [B, T], 0 where padded; the lengths are of GSM8K's kind, shrunk."""

    def __init__(self, seed: int, settings: Settings) -> None:
        random = np.random.default_rng(seed)
        lengths = random.integers(1, LONGEST + 1, SEQUENCES)
        self.mask = (np.arange(LONGEST) < lengths[:, None]).astype(np.int64)
        shape = self.mask.shape
        self.old = random.normal(-2, 0.5, shape)
        narrow = None if "clip_high" in settings else {"gspo": 3e-4, "luspo": 3e-3}.get(settings["loss"])
        apart = narrow or random.choice([0.1, 0.5, 1.5])
        self.new = self.old if settings.get("on_policy") else self.old + random.normal(0, apart, shape)
        baseline = "others" if settings["loss"] == "reinforce" else "group"
        self.advantages = group_advantages(random.normal(size=SEQUENCES), baseline).astype(np.float64)
        self.reference, self.entropies = random.normal(-2, 0.5, shape), random.uniform(0, 3, shape)

    def columns(self) -> dict[str, np.ndarray]:
        return vars(self)


def ours(case: Case, settings: Settings) -> tuple[float, np.ndarray]:
    options = GrpoOptions(**{name: value for name, value in settings.items() if name != "on_policy"})
    loss, at = LOSSES[options.loss], case.mask.astype(bool)
    lengths = case.mask.sum(1)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    weights = token_weights(
        options.average or loss.average, np.ones(offsets[-1], np.bool_), offsets, options.loss_length
    )
    new = torch.tensor(case.new, requires_grad=True)
    sequence = torch.from_numpy(np.repeat(np.arange(SEQUENCES), lengths))
    rows = Rows(new[at], torch.from_numpy(case.old[at]), torch.from_numpy(case.advantages)[sequence], sequence)
    values = loss.having(**options.loss_values)(rows, clip_of(options, loss)).values
    if options.kl is not None:
        apart = divergence(options.kl.estimator, rows.logprobs, torch.from_numpy(case.reference[at]), rows.old)
        values = values + options.kl.coefficient * apart
    values = values - options.entropy_coefficient * torch.from_numpy(case.entropies[at])
    total = (values * torch.from_numpy(weights)).sum()
    total.backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    return float(total.detach()), new.grad.numpy()


def theirs(cases: list[tuple[Case, Settings]]) -> list[tuple[float, np.ndarray]]:
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "cases.npz", Path(folder) / "results.npz"
        columns = {
            f"{i}/{name}": column for i, (case, _) in enumerate(cases) for name, column in case.columns().items()
        }
        settings = json.dumps([{"trainer": "grpo", **settings} for _, settings in cases])
        np.savez(given, settings=np.array(settings), **columns)
        script = Path(__file__).with_name("trl_losses.py")
        subprocess.run([TRL, script, given, made], check=True, timeout=300)
        results = np.load(made)
        return [(float(results[f"{i}/loss"]), results[f"{i}/gradient"]) for i in range(len(cases))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=50, help="random batches for each row")
    wanted = parser.parse_args()
    cases = [(Case(seed, mine), mine, trl) for _, mine, trl in ROWS for seed in range(wanted.cases)]
    answers = theirs([(case, trl) for case, _, trl in cases])
    rows: list[dict[str, Any]] = []
    for number, (name, _, _) in enumerate(ROWS):
        value = gradient = moved = 0.0
        for (case, mine, _), (their_value, their_gradient) in list(zip(cases, answers, strict=True))[
            number * wanted.cases : (number + 1) * wanted.cases
        ]:
            our_value, our_gradient = ours(case, mine)
            if not mine.get("on_policy"):  # then the values are of different things, and the gradients of one
                value = max(value, abs(our_value - their_value))
            gradient = max(gradient, float(np.abs(our_gradient - their_gradient).max()))
            moved = max(moved, float(np.abs(our_gradient).max()))
        holds = value <= VALUE and gradient <= GRADIENT and moved > 100 * GRADIENT
        rows.append({"loss": name, "value": value, "gradient": gradient, "largest_gradient": moved, "holds": holds})
    console.table(
        ("", "value differs by", "gradient differs by", "of up to", "holds"),
        [
            (row["loss"], f"{row['value']:.1e}", f"{row['gradient']:.1e}", f"{row['largest_gradient']:.2g}",
             "yes" if row["holds"] else "NO")
            for row in rows
        ],
    )  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "losses.json").write_text(json.dumps({"machine": described(), "rows": rows}, indent=1) + "\n")
    raise SystemExit(0 if all(row["holds"] for row in rows) else 1)


if __name__ == "__main__":
    main()

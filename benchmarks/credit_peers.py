"""The bias of other frameworks' advantages, measured on their own code by the kit of `plugins/credit`.

    python -m benchmarks.credit_peers --trl DIR --verl DIR --skyrl DIR --prime-rl DIR

Each DIR is a clone of that framework. Its functions are taken from the source of its HEAD, one by one, and nothing of it is
installed. All of them give one advantage to a whole episode. What their trainers do to a whole batch (whitening) is left out.
Writes benchmarks/results/credit_peers.json.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from atropos_core import console
from atropos_credit.kit import by_rows, by_scores, likelihood
from atropos_credit.kit.known import TASKS, Known
from atropos_credit.kit.table import Measurement, percent, rows
from atropos_credit.turns import Estimator
from benchmarks.machine import RESULTS, described

VERL, SKYRL = "verl/trainer/ppo/core_algos.py", "skyrl/backends/skyrl_train/utils/ppo_utils.py"
TRL, TRL_UTILS = "trl/trainer/grpo_trainer.py", "trl/trainer/utils.py"
PRIME = "src/prime_rl/orchestrator/algo/{}.py"
REPOSITORIES = {
    "trl": "huggingface/trl",
    "verl": "volcengine/verl",
    "skyrl": "NovaSky-AI/SkyRL",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
}


class Source(NamedTuple):
    """A clone of a framework."""

    folder: Path

    def text(self, path: str) -> str:
        return subprocess.run(
            ["git", "-C", self.folder, "show", f"HEAD:{path}"], capture_output=True, text=True, check=True
        ).stdout

    @property
    def commit(self) -> str:
        return subprocess.run(
            ["git", "-C", self.folder, "log", "-1", "--format=%h of %cs"], capture_output=True, text=True, check=True
        ).stdout.strip()

    def functions(self, path: str, names: Sequence[str], **known: Any) -> SimpleNamespace:
        """These functions of one file, without their decorators and annotations."""
        found = []
        for node in ast.parse(self.text(path)).body:
            if isinstance(node, ast.FunctionDef) and node.name in names:
                node.decorator_list, node.returns = [], None
                for argument in [*node.args.args, *node.args.kwonlyargs]:
                    argument.annotation = None
                node.body = [one for one in node.body if not isinstance(one, ast.ImportFrom)]  # of a logger
                found.append(node)
        return SimpleNamespace(**_run(found, torch=torch, np=np, defaultdict=defaultdict, **known))


def _run(nodes: Sequence[ast.stmt], **known: Any) -> dict[str, Any]:
    names = dict(known)
    exec(compile(ast.fix_missing_locations(ast.Module(list(nodes), [])), "<theirs>", "exec"), names)
    return names


def of_trl(source: Source) -> list[Known]:
    utils = source.functions(TRL_UTILS, ["nanstd"])
    [branch] = [
        node
        for node in ast.walk(ast.parse(source.text(TRL)))
        if isinstance(node, ast.If)
        and "multi_objective_aggregation == 'sum_then_normalize'" in ast.unparse(node.test)
        and any(isinstance(one, ast.Assign) and "advantages" in ast.unparse(one.targets[0]) for one in node.body)
    ]

    def advantages(scores: Any, scale: str) -> Any:
        given = torch.from_numpy(scores).unsqueeze(1)
        trainer = SimpleNamespace(scale_rewards=scale, reward_weights=torch.ones(1, dtype=torch.float64))
        return _run(
            branch.body, torch=torch, nanstd=utils.nanstd, self=trainer, rewards_per_func=given, device="cpu",
            unscorable_mask=torch.zeros(len(scores), dtype=torch.bool), num_generations=len(scores),
        )["advantages"]  # fmt: skip

    return [
        Known('TRL, scale_rewards = "group"', by_scores(lambda scores: advantages(scores, "group"))),
        Known('TRL, scale_rewards = "none"', by_scores(lambda scores: advantages(scores, "none"))),
    ]


def of_verl(source: Source) -> list[Known]:
    names = {
        "grpo": "compute_grpo_outcome_advantage", "rloo": "compute_rloo_outcome_advantage", "opo": "compute_opo_outcome_advantage",
        "reinforce": "compute_reinforce_plus_plus_outcome_advantage",
    }  # fmt: skip
    unwhitened = SimpleNamespace(masked_whiten=lambda values, mask: values)
    made = source.functions(VERL, list(names.values()), verl_F=unwhitened)
    config = SimpleNamespace(gamma=1.0)
    return [
        Known("verl, grpo", by_rows(made.compute_grpo_outcome_advantage)),
        Known("verl, grpo without std", by_rows(made.compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False)),
        Known("verl, rloo", by_rows(made.compute_rloo_outcome_advantage)),
        Known("verl, opo", by_rows(made.compute_opo_outcome_advantage)),
        Known(
            "verl, reinforce_plus_plus before whitening",
            _without_index(by_rows, made.compute_reinforce_plus_plus_outcome_advantage, config=config),
        ),
    ]


def of_skyrl(source: Source) -> list[Known]:
    names = ["grpo_outcome", "rloo_outcome", "maxrl", "reinforce_plus_plus_outcome"]
    made = source.functions(
        SKYRL, [f"compute_{name}_advantage" for name in names], masked_whiten=lambda values, mask: values, logger_=None
    )
    return [
        Known("SkyRL, grpo", by_rows(made.compute_grpo_outcome_advantage)),
        Known("SkyRL, grpo without std", by_rows(made.compute_grpo_outcome_advantage, grpo_norm_by_std=False)),
        Known("SkyRL, rloo", by_rows(made.compute_rloo_outcome_advantage)),
        Known("SkyRL, reinforce++ before whitening", by_rows(made.compute_reinforce_plus_plus_outcome_advantage, gamma=1.0)),
        Known(
            "SkyRL, maxrl", by_rows(made.compute_maxrl_advantage), "G - 1 terms of log p",
            lambda group_size: likelihood(group_size - 1), worlds=("answer",),
        ),
    ]  # fmt: skip


def of_prime_rl(source: Source) -> list[Known]:
    def scoring(module: str) -> Callable[[Any], list[float]]:
        [group] = [one for one in ast.parse(source.text(PRIME.format(module))).body if isinstance(one, ast.ClassDef)]
        [method] = [one for one in group.body if getattr(one, "name", "") == "score_group"]
        method.args.args[1].annotation = method.returns = None
        function = _run(
            [method], torch=torch, iter_trainable_traces=lambda given: [(None, one) for one in given],
            assign_advantages=lambda trace, value: setattr(trace, "advantage", value),
        )["score_group"]  # fmt: skip

        def scored(scores: Any) -> list[float]:
            traces = [SimpleNamespace(reward=score) for score in scores.tolist()]
            asyncio.run(function(SimpleNamespace(length_penalty=None), traces))
            return [trace.advantage for trace in traces]

        return scored

    return [
        Known("prime-rl, grpo", by_scores(scoring("grpo"))),
        Known(
            "prime-rl, max_rl", by_scores(scoring("max_rl")), "G - 1 terms of log p",
            lambda group_size: likelihood(group_size - 1), worlds=("answer",),
        ),
    ]  # fmt: skip


def _without_index(wrap: Callable[..., Estimator], function: Callable[..., Any], **options: Any) -> Estimator:
    return wrap(
        lambda token_level_rewards, response_mask, index: function(token_level_rewards, response_mask, **options)
    )


FLOAT32 = 1e-6  # below this, what is left is the rounding of their float32
FRAMEWORKS = {"trl": of_trl, "verl": of_verl, "skyrl": of_skyrl, "prime-rl": of_prime_rl}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in FRAMEWORKS:
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", required=True)
    parser.add_argument("--group-size", type=int, default=3)
    wanted = parser.parse_args()
    found, every = {}, []
    for name, estimators in FRAMEWORKS.items():
        source = Source(getattr(wanted, name.replace("-", "_")))
        found[name] = {"repository": REPOSITORIES[name], "version": source.commit}
        every += rows(estimators(source), wanted.group_size, seed=0)
    console.table(("", "objective", *TASKS, "answer", "turned"), [_cells(row) for row in every])
    document = [
        {
            "estimator": row.known.name,
            "objective": row.known.objective_name,
            "worlds": {world: asdict(one) for world, one in row.measured.items()},
        }
        for row in every
    ]
    (RESULTS / "credit_peers.json").write_text(
        json.dumps(
            {"machine": described(), "group_size": wanted.group_size, "frameworks": found, "rows": document}, indent=1
        )
        + "\n"
    )


def _cells(row: Measurement) -> list[str]:
    biases = [
        percent(row.measured[world].bias, FLOAT32) if world in row.measured else "" for world in (*TASKS, "answer")
    ]
    return [
        row.known.name, row.known.objective_name, *biases, percent(max(one.turned for one in row.measured.values()), FLOAT32),
    ]  # fmt: skip


if __name__ == "__main__":
    main()

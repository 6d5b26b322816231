"""Recipes of tinker-cookbook as they are, on local data, against `atropos tinker`."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tinker.server import CLIENT, SCRIPTS, TinkerServer, tinker_server
from tests.waiting import wait_until

RECIPE_S = 280
RL_STEPS, RL_GROUPS = 16, 2  # of math_rl, which draws the same problems at each step of every run
TAUGHT_STEPS = 80


def begin(server: TinkerServer, recipe: str, log: Path, **options: object) -> subprocess.Popen[bytes]:
    """Start a recipe as its README says: `python -m tinker_cookbook.recipes.RECIPE name=value ...`."""
    environment = {
        "TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    given = [f"{name}={value}" for name, value in {"log_path": log, "renderer_name": "role_colon", **options}.items()]
    command = [os.path.abspath(CLIENT), "-m", f"tinker_cookbook.recipes.{recipe}", *given]
    with log.with_suffix(".log").open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, cwd=log.parent, env={**os.environ, **environment})


def run(server: TinkerServer, recipe: str, log: Path, **options: object) -> list[dict[str, Any]]:
    """Run a recipe to its end. Returns its metrics of each step."""
    process = begin(server, recipe, log, **options)
    try:
        code = process.wait(RECIPE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    assert code == 0, log.with_suffix(".log").read_text()[-4000:]
    return read(log / "metrics.jsonl")


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def checkpoints(log: Path) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in read(log / "checkpoints.jsonl")}


def final(server: TinkerServer, log: Path) -> dict[str, torch.Tensor]:
    """The adapter that a recipe ended with."""
    saved = server.adapter(checkpoints(log)["final"]["sampler_path"])
    return load_file(saved / "adapter_model.safetensors")


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and one
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def mean(metrics: list[dict[str, Any]], name: str) -> float:
    found = [one[name] for one in metrics if name in one]
    return sum(found) / len(found)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations in which an addition is answered."""
    dice, file = random.Random(0), tmp_path_factory.mktemp("data") / "sums.jsonl"
    with file.open("w") as lines:
        for _ in range(2000):
            one, other = dice.randint(0, 100), dice.randint(0, 100)
            turns = [
                ("user", "What is 4 + 5?"),
                ("assistant", "9"),
                ("user", f"What is {one} + {other}?"),
                ("assistant", str(one + other)),
            ]
            lines.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    return file


@pytest.fixture(scope="module")
def half_right(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that knows the answers of the recipe's first problems by heart, and was taught to say 0 instead every second time."""
    directory = tmp_path_factory.mktemp("half_right")
    rows, model = directory / "rows.json", directory / "model"
    with rows.with_suffix(".log").open("wb") as log:
        command = [CLIENT, str(SCRIPTS / "arithmetic.py"), str(rows), tiny, str(RL_STEPS), str(RL_GROUPS)]
        subprocess.run(command, check=True, stdout=log, stderr=log, timeout=RECIPE_S)
    data = json.loads(rows.read_text())
    length = max(len(ids) for ids, _ in data)
    tokens, weights = (torch.tensor([row[of] + [0] * (length - len(row[of])) for row in data]) for of in (0, 1))
    policy = AutoModelForCausalLM.from_pretrained(tiny)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3, betas=(0.9, 0.95))
    targets, of_the_answer = tokens[:, 1:].flatten(), weights[:, 1:].flatten()
    for _ in range(TAUGHT_STEPS):
        logits = policy(tokens).logits[:, :-1].flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        optimizer.zero_grad()
        ((losses * of_the_answer).sum() / of_the_answer.sum()).backward()
        optimizer.step()
    shutil.copytree(tiny, model)
    policy.save_pretrained(model)
    return str(model)


def test_chat_sl_ends_with_the_same_weights_after_kills(
    server: TinkerServer, tiny: str, sums: Path, tmp_path: Path
) -> None:
    """A kill of the server goes unnoticed. After one of the recipe, two runs from its last checkpoint have the same bits. They are not
    those of a run without a kill, whatever the server: the recipe saves a checkpoint after it has submitted the next batch, and submits
    that batch again when it is resumed."""
    options: dict[str, object] = {
        "model_name": tiny, "dataset": sums, "batch_size": 4, "max_length": 128, "max_steps": 24, "learning_rate": 1e-3,
        "save_every": 3, "eval_every": 0, "infrequent_eval_every": 0, "behavior_if_log_dir_exists": "resume",
        "load_checkpoint_path": server.run("start.py", tiny, out=tmp_path / "start.json"),
    }  # fmt: skip
    whole, served, killed, again = (tmp_path / name for name in ("whole", "served", "killed", "again"))
    run(server, "chat_sl.train", whole, **options)

    process = begin(server, "chat_sl.train", served, **options)
    wait_until(lambda: checkpoints(served), "a checkpoint", RECIPE_S)
    server.kill()
    assert "final" not in checkpoints(served), "it was killed before its end"
    server.start()
    assert process.wait(RECIPE_S) == 0, served.with_suffix(".log").read_text()[-4000:]
    assert_same(final(server, whole), final(server, served))

    process = begin(server, "chat_sl.train", killed, **options)
    wait_until(lambda: checkpoints(killed), "a checkpoint", RECIPE_S)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert "final" not in checkpoints(killed), "it was killed before its end"
    shutil.copytree(killed, again)
    for log in (killed, again):
        run(server, "chat_sl.train", log, **options)
        assert "Resumed training from" in log.with_suffix(".log").read_text()
    assert_same(final(server, killed), final(server, again))


@pytest.fixture(scope="module")
def server_half_right(half_right: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    with tinker_server(tmp_path_factory.mktemp("tinker"), half_right) as running:
        yield running


def math_rl(server: TinkerServer, log: Path, **options: object) -> list[dict[str, Any]]:
    return run(
        server, "math_rl.train", log, model_name=server.model, env="arithmetic", loss_fn="importance_sampling", group_size=32,
        groups_per_batch=RL_GROUPS, max_tokens=12, max_steps=RL_STEPS, save_every=0, eval_every=0, **options,
    )  # fmt: skip


def rewards(metrics: list[dict[str, Any]]) -> list[float]:
    return [one["env/all/reward/total"] for one in metrics if "env/all/reward/total" in one]


@pytest.fixture(scope="module")
def untrained(server_half_right: TinkerServer, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The rewards of each step's problems without learning: problems differ by more than what is learned."""
    return rewards(math_rl(server_half_right, tmp_path_factory.mktemp("untrained") / "log", learning_rate=0.0))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("off_policy", [None, 1])
def test_the_reward_of_math_rl_rises(
    server_half_right: TinkerServer, untrained: list[float], tmp_path: Path, off_policy: int | None
) -> None:
    """It learns to say the answer that it knows. The sampler and the trainer agree on the logprobs of the sampled tokens; one step off
    policy, they are those of an older adapter."""
    more = {} if off_policy is None else {"max_steps_off_policy": off_policy}
    metrics = math_rl(server_half_right, tmp_path / "log", learning_rate=4e-4, **more)
    gained = [one - before for one, before in zip(rewards(metrics), untrained, strict=True)]
    assert sum(gained[-8:]) / 8 > 0.1, (rewards(metrics), untrained)
    gaps = [abs(one["optim/kl_sample_train_v1"]) for one in metrics if "optim/kl_sample_train_v1" in one]
    assert len(gaps) == RL_STEPS and max(gaps) < (1e-5 if off_policy is None else 0.1), gaps


def test_guess_number_trains_on_conversations_of_several_turns(tiny: str, tmp_path: Path) -> None:
    """Ten turns are longer than the tiny model's context, so it gets a longer one."""
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    with tinker_server(tmp_path, str(model)) as server:
        metrics = run(
            server, "multiplayer_rl.guess_number.train", tmp_path / "log", model_name=model, batch_size=2, group_size=2,
            max_tokens=6, max_steps=2, save_every=0, eval_every=0,
        )  # fmt: skip
        assert mean(metrics, "env/all/turns_per_episode") > 1 and final(server, tmp_path / "log")


def test_dpo_prefers_the_chosen_answers(server: TinkerServer, tiny: str, tmp_path: Path) -> None:
    """Its loss is a custom one of the client: logprobs go there, and gradients come back as weights."""
    dice, pairs = random.Random(1), tmp_path / "pairs.jsonl"
    with pairs.open("w") as lines:
        for _ in range(64):
            one, other = dice.randint(0, 9), dice.randint(0, 9)
            lines.write(
                json.dumps(
                    {"question": f"What is {one} + {other}?", "good": str(one + other), "bad": f"It is {other}."}
                )
                + "\n"
            )
    metrics = server.run("dpo.py", tiny, pairs, tmp_path / "log", out=tmp_path / "dpo.json")
    assert metrics[0]["margin"] == pytest.approx(0.0, abs=1e-3), "the reference is the start"
    assert metrics[-1]["dpo_loss"] < metrics[0]["dpo_loss"] - 0.1
    assert metrics[-1]["accuracy"] == 1.0 and metrics[-1]["margin"] > 0.2

"""One environment file, by import and as it is over `atropos serve`: the same groups, for the same scripted model."""

from __future__ import annotations

import asyncio
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from atropos_core.plugins.provider import RunContext
from atropos_core.rollouts.runner import checked_episode
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Episode, Rollout
from atropos_env_atroposlib.environment import AtroposlibEnvironment
from atropos_env_atroposlib.options import AtroposlibOptions
from atropos_trajectory_api.legacy_groups.incoming_groups import from_wire
from tests.atroposlib.processes import REPOSITORY, TINY, OurServer, Process
from tests.atroposlib.same_model import ScriptedPolicy, ScriptedServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
]  # both sides are started once, and importing torch takes long on a busy machine

FILE = REPOSITORY / "plugins/env_atroposlib/tests/files/same_groups.py"
N, GROUPS, DEADLINE_S = 4, 16, 300.0  # two rounds of seven shapes, one of which has two groups for an item
Groups = dict[str, list[Episode]]  # by what the first prompt asks for
Pairs = dict[str, list[tuple[Rollout, Rollout]]]  # by shape: by import, and served
TOKENIZER = ChatTokenizer(TINY)


def key_of(rollout: Rollout) -> str:
    found = re.search(r"<<(.*?)>>", TOKENIZER.decode(rollout.tokens))
    assert found is not None
    return found[1]


def by_key(groups: list[list[Episode]]) -> Groups:
    """Members of a group in the order of their replies, which may have come in any."""
    made = {
        key_of(group[0].rollouts[0]): sorted(group, key=lambda one: str(one.rollouts[0].tokens.tolist()))
        for group in groups
    }
    assert len(made) == len(groups), "each group once"
    return made


def served(url: str, model: ScriptedServer, folder: Path) -> Groups:
    """Of the file as atroposlib runs it, as a trainer behind our server gets them."""
    register = {
        "wandb_group": "", "wandb_project": "", "batch_size": N, "max_token_len": 2048, "checkpoint_dir": "",
        "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1000,
    }  # fmt: skip
    httpx.post(f"{url}/register", json=register).raise_for_status()
    worker = Process(
        folder / "environment.log", os.environ["ATROPOSLIB_PYTHON"], str(FILE), "serve",
        "--env.rollout_server_url", url, "--env.tokenizer_name", str(TINY), "--openai.base_url", model.url,
        "--openai.tokenizer_name", str(TINY),
    )  # fmt: skip
    groups: list[list[Episode]] = []
    until = time.monotonic() + DEADLINE_S
    try:
        while len(groups) < GROUPS:
            assert worker.process.poll() is None, worker.text[-4000:]
            assert time.monotonic() < until, f"{len(groups)} groups: {worker.text[-4000:]}"
            for one in httpx.get(f"{url}/batch").json()["batch"] or ():
                groups.append(list(from_wire(one, environment="shapes", version=0).episodes))
            time.sleep(0.05)
    finally:
        worker.end()
    return by_key(groups[:GROUPS])


def imported(folder: Path) -> Groups:
    async def run() -> list[list[Episode]]:
        context = RunContext(folder, TINY, label="environment.same")
        environment = AtroposlibEnvironment(AtroposlibOptions(file=str(FILE)), context)
        try:
            await environment.open()
            policy, groups = ScriptedPolicy(TINY), []
            for task in environment.tasks("train")[:GROUPS]:
                given = await environment.rollout_group(task, policy, N, seeds=range(N))
                assert len(given) == N and all(isinstance(one, Episode) for one in given)
                groups.append([checked_episode(one) for one in given])  # type: ignore[arg-type]
            return groups
        finally:
            await environment.close()

    return by_key(asyncio.run(run()))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Rollouts by import beside those that were served, once groups, scores and messages are the same."""
    folder = tmp_path_factory.mktemp("same")
    model, server = ScriptedServer(TINY), OurServer(folder / "api")
    try:
        theirs = served(server.url, model, folder)
    finally:
        server.end()
        model.close()
    ours = imported(folder)
    assert ours.keys() == theirs.keys()
    made: Pairs = {}
    for key in ours:
        assert len(ours[key]) == len(theirs[key]) == N
        for mine, other in zip(ours[key], theirs[key], strict=True):
            assert mine.score == other.score
            if other.messages:
                assert [dict(one) for one in mine.messages] == [dict(one) for one in other.messages]
            assert len(mine.rollouts) == len(other.rollouts) == 1
            made.setdefault(key.split()[0], []).append((mine.rollouts[0], other.rollouts[0]))
    assert len(made) == 7 and all(len(found) >= 2 * N for found in made.values())
    return made


def same(mine: Rollout, other: Rollout) -> None:
    assert mine.tokens.tolist() == other.tokens.tolist()
    assert mine.trained.tolist() == other.trained.tolist()
    assert mine.sft == other.sft
    assert mine.temperature == other.temperature
    assert (mine.advantages is None) == (other.advantages is None)
    if mine.advantages is not None and other.advantages is not None:
        assert mine.advantages[mine.trained].tolist() == other.advantages[other.trained].tolist()
    if other.logprobs is not None and not mine.sft:
        assert mine.logprobs is not None
        assert mine.logprobs[mine.trained].tolist() == other.logprobs[other.trained].tolist()


def right_logprobs(rollout: Rollout) -> bool:
    """Those with which the script sampled."""
    if rollout.logprobs is None:
        return False
    ids = rollout.tokens[rollout.trained].tolist()
    return rollout.logprobs[rollout.trained].tolist() == [-(token % 64) / 64 for token in ids]


@pytest.mark.parametrize("shape", ["managed_chat", "managed_turns", "managed_text", "overridden"])
def test_groups_of_managed_servers_are_the_same_token_by_token(shape: str, pairs: Pairs) -> None:
    for mine, other in pairs[shape]:
        same(mine, other)
        assert (other.logprobs is None) == (shape == "managed_turns"), (
            "its collect_trajectories() leaves them out of items"
        )
        assert mine.sft or right_logprobs(mine)
    assert {mine.sft for mine, _ in pairs["overridden"]} == {True, False}


def test_an_end_of_turn_that_atroposlib_says_twice_is_said_once(pairs: Pairs) -> None:
    [end] = TOKENIZER.encode(TOKENIZER.eos).tolist()
    for mine, other in pairs["ended_turns"]:
        ids = other.tokens.tolist()
        twice = [at for at in range(1, len(ids)) if ids[at - 1] == ids[at] == end]
        assert len(twice) == 2, "after each reply that another follows"
        assert not other.trained[twice].any()
        kept = np.setdiff1d(np.arange(len(ids)), twice)
        columns = {name: getattr(other, name)[kept] for name in ("tokens", "trained", "sampled", "policy_version")}
        same(mine, replace(other, **columns))
        assert right_logprobs(mine)


@pytest.mark.parametrize("shape", ["chat_text", "plain_text"])
def test_text_that_is_encoded_again_has_the_same_tokens_and_by_import_the_logprobs_too(
    shape: str, pairs: Pairs
) -> None:
    for mine, other in pairs[shape]:
        assert other.logprobs is None
        same(mine, other)
        assert right_logprobs(mine)


def test_the_two_forms_of_the_model_say_the_same() -> None:
    model = ScriptedServer(TINY)
    prompt = TOKENIZER.encode("<<x>>")
    try:
        url = model.url.removesuffix("/v1")
        call: dict[str, Any] = {"prompt": {"prompt_token_ids": prompt.tolist()}, "n": 2}
        rows = httpx.post(f"{url}/generate", json=call).json()["logprobs"]
    finally:
        model.close()
    for row, made in zip(rows, asyncio.run(ScriptedPolicy(TINY).sample(prompt, n=2)), strict=True):
        assert [int(next(iter(one))) for [one] in row] == made.tokens.tolist()
        assert [next(iter(one.values())) for [one] in row] == made.logprobs.tolist()

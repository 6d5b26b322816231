"""Files of atroposlib's shapes, each in a real process of its own, sampled from the toy engine."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import atropos_core
from atropos_core.builtin.config import ToyEngineOptions
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.builtin.toy import ToyEngine
from atropos_core.errors import AtroposError, ConfigError, DataError, DeadlineExceeded, RemoteError
from atropos_core.plugins.provider import RunContext
from atropos_core.rollouts.engine_policy import EnginePolicy
from atropos_core.rollouts.runner import checked
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Episode, Sampling
from atropos_env_atroposlib.environment import AtroposlibEnvironment
from atropos_env_atroposlib.options import AtroposlibOptions

T = TypeVar("T")
FILES = Path(__file__).parent / "files"
N = 4
Group = list[Episode]


@pytest.fixture
def words(tmp_path: Path) -> Path:
    rows = [json.dumps({"question": f"word {number}"}) for number in range(5)]
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(rows))
    return folder


def within_environment(
    tmp_path: Path, use: Callable[[AtroposlibEnvironment, Any], Awaitable[T]], file: str, **options: Any
) -> T:
    async def run() -> T:
        context = RunContext(tmp_path, TOY_MODEL, label="environment.it")
        engine = ToyEngine(ToyEngineOptions(), context)
        policy = EnginePolicy(engine, ChatTokenizer(TOY_MODEL), Sampling(max_tokens=8), deadline_s=60)
        environment = AtroposlibEnvironment(AtroposlibOptions(file=f"{FILES / file}", **options), context)
        try:
            await environment.open()
            return await use(environment, policy)
        finally:
            await environment.close()

    return asyncio.run(run())


async def group_of(environment: AtroposlibEnvironment, policy: Any, index: int = 0, n: int = N) -> list[Any]:
    task = environment.tasks("train")[index]
    given = await environment.rollout_group(task, policy, n, seeds=[index * 100 + member for member in range(n)])
    return [checked(one, 10_000) for one in given if not isinstance(one, BaseException)]


def test_text_that_is_encoded_again_is_trained_with_the_ids_and_logprobs_that_were_sampled(
    tmp_path: Path, words: Path
) -> None:
    async def use(environment: AtroposlibEnvironment, policy: Any) -> tuple[Group, dict[str, float]]:
        asked: list[Any] = []
        sample = policy.sample

        async def seen(*given: Any, **more: Any) -> Any:
            asked.extend(made := await sample(*given, **more))
            return made

        policy.sample = seen
        group = await group_of(environment, policy)
        found = {tuple(one.tokens.tolist()): one.logprobs for one in asked}
        for episode in group:
            [rollout] = episode.rollouts
            ids = tuple(rollout.tokens[rollout.trained].tolist())
            assert ids in found, "what is trained is what was sampled"
            assert rollout.logprobs is not None
            assert (rollout.logprobs[rollout.trained] == found[ids]).all()
        return group, environment.metrics()

    group, metrics = within_environment(tmp_path, use, "one_turn.py", datasets={"someone/words": str(words)})
    assert len(group) == N
    assert metrics["sequences_by_ids"] + metrics["sequences_by_text"] == N
    assert metrics["sequences_without_logprobs"] == 0


def test_an_installed_atroposlib_is_not_touched_and_this_process_has_none(tmp_path: Path, words: Path) -> None:
    async def use(environment: AtroposlibEnvironment, policy: Any) -> None:
        await group_of(environment, policy)

    within_environment(tmp_path, use, "one_turn.py", datasets={"someone/words": str(words)})
    assert not any(name.partition(".")[0] == "atroposlib" for name in sys.modules)


def test_turns_of_a_managed_server_are_one_history_with_every_sampled_token_trained(tmp_path: Path) -> None:
    async def use(environment: AtroposlibEnvironment, policy: Any) -> Group:
        return await group_of(environment, policy)

    for episode in within_environment(tmp_path, use, "many_turns.py:Managed"):
        [rollout] = episode.rollouts
        assert (rollout.trained == rollout.sampled).all()
        edges = np.flatnonzero(np.diff(np.concatenate([[False], rollout.sampled]).astype(np.int8)) == 1)
        assert len(edges) == 2, "two replies, with what the environment said between them"
        assert episode.messages[-1]["role"] == "assistant"


def test_a_file_beside_its_package_imports_it_by_a_dot(tmp_path: Path) -> None:
    (tmp_path / "dotted").mkdir()
    (tmp_path / "dotted" / "rules.py").write_text("PROMPT = 'dotted:'")
    source = (
        (FILES / "many_turns.py").read_text().replace("import asyncio", "import asyncio\nfrom .rules import PROMPT")
    )
    (tmp_path / "dotted" / "dotted.py").write_text(source.replace('"one:"', "PROMPT"))

    async def use(environment: AtroposlibEnvironment, policy: Any) -> Group:
        return await group_of(environment, policy)

    for episode in within_environment(tmp_path, use, str(tmp_path / "dotted" / "dotted.py:Completing")):
        assert ChatTokenizer(TOY_MODEL).decode(episode.rollouts[0].tokens).startswith("dotted:")


def test_a_second_group_of_one_item_is_kept_for_the_next_draw_and_a_judge_is_not_trained(tmp_path: Path) -> None:
    async def use(environment: AtroposlibEnvironment, policy: Any) -> tuple[Group, Group]:
        return await group_of(environment, policy, 0), await group_of(environment, policy, 1)

    first, second = within_environment(tmp_path, use, "many_turns.py:Completing")
    text = ChatTokenizer(TOY_MODEL).decode
    for group, prompt in ((first, "one:"), (second, "two:")):
        assert len(group) == N
        for at, episode in enumerate(group):
            [rollout] = episode.rollouts
            assert text(rollout.tokens).startswith(prompt)
            assert rollout.advantages is not None
            assert set(rollout.advantages[rollout.trained].tolist()) == {0.5 if at else 0.0}


def test_what_nobody_sampled_is_trained_without_logprobs_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def use(environment: AtroposlibEnvironment, policy: Any) -> tuple[list[Any], dict[str, float]]:
        return await group_of(environment, policy), environment.metrics()

    group, metrics = within_environment(tmp_path, use, "many_turns.py:Invented")
    sampled, invented, *missing = group
    assert sampled.rollouts[0].logprobs is not None
    assert invented.rollouts[0].logprobs is None
    assert invented.rollouts[0].trained.any()
    assert [one.cause for one in missing] == ["the environment gave 2 of 4 sequences"] * 2
    assert metrics["sequences_without_logprobs"] == 1
    assert "trained without logprobs" in capsys.readouterr().err


def test_a_process_that_ends_fails_its_rollouts_by_name_and_is_started_again(tmp_path: Path) -> None:
    async def use(environment: AtroposlibEnvironment, policy: Any) -> list[Any]:
        first = await group_of(environment, policy, 0)
        with pytest.raises(RemoteError, match="environment-it .* ended with exit code 9"):
            await group_of(environment, policy, 1)
        return [first, await group_of(environment, policy, 1), await group_of(environment, policy, 2)]

    flag = str(tmp_path / "died")
    for group in within_environment(tmp_path, use, "many_turns.py:Dying", config={"wandb_name": flag}):
        assert all(isinstance(one, Episode) for one in group)


def test_what_it_saves_is_taken_up_again(tmp_path: Path, words: Path) -> None:
    async def use(environment: AtroposlibEnvironment, policy: Any) -> tuple[Any, str]:
        environment.load({"step": 3, "data": {"iter": 4}})
        [first, *_] = await group_of(environment, policy)
        return environment.state(), ChatTokenizer(TOY_MODEL).decode(first.rollouts[0].tokens)

    state, text = within_environment(tmp_path, use, "one_turn.py", datasets={"someone/words": str(words)})
    assert state == {"step": 3, "data": {"iter": 4}}
    assert "word 4" in text


def test_its_own_evaluation_is_one_test_task(tmp_path: Path, words: Path) -> None:
    async def use(environment: AtroposlibEnvironment, policy: Any) -> Any:
        [task] = environment.tasks("test")
        [episode] = await environment.rollout_group(task, policy, 1, seeds=[7])
        return checked(episode)  # type: ignore[arg-type]

    episode = within_environment(tmp_path, use, "one_turn.py", datasets={"someone/words": str(words)})
    assert dict(episode.metrics) == {"percent_correct": 0.25, "asked": 2.0}
    assert episode.score == 0.25
    assert len(episode.rollouts) == 2


@pytest.mark.parametrize(
    ("file", "options", "error"),
    [
        ("many_turns.py", {}, "has 5 environments .* and one is run"),
        ("many_turns.py:Nobody", {}, "has no environment 'Nobody'"),
        ("nothing.py", {}, "there is no file"),
        ("one_turn.py", {"config": {"leter": "b"}}, "config.leter is no field of LettersConfig"),
        ("one_turn.py", {"datasets": {"someone/words": "/nowhere"}}, "should be at /nowhere"),
        ("needs.py:Needs", {}, "imports 'surely_not_there', which is not installed"),
    ],
)
def test_what_is_wrong_is_one_error(tmp_path: Path, file: str, options: dict[str, Any], error: str) -> None:
    async def use(environment: AtroposlibEnvironment, policy: Any) -> None: ...

    with pytest.raises(AtroposError, match=error):
        within_environment(tmp_path, use, file, **options)


def test_what_a_run_file_says_reaches_the_environment(tmp_path: Path, words: Path) -> None:
    async def use(environment: AtroposlibEnvironment, policy: Any) -> tuple[Group, int, int]:
        return await group_of(environment, policy), len(environment.tasks("train")), len(environment.tasks("test"))

    datasets, config = {"someone/words": str(words)}, {"letter": " "}
    group, train, test = within_environment(
        tmp_path, use, "one_turn.py", datasets=datasets, config=config, items=7, evaluates=False
    )
    assert (train, test) == (7, 0)
    said = [ChatTokenizer(TOY_MODEL).decode(one.rollouts[0].tokens[one.rollouts[0].trained]) for one in group]
    assert [one.score for one in group] == [float(text.count(" ")) for text in said]


def test_no_group_for_so_many_items_in_turn_is_a_failure(tmp_path: Path) -> None:
    async def use(environment: AtroposlibEnvironment, policy: Any) -> Group:
        return await group_of(environment, policy)

    with pytest.raises(DataError, match="no group for 1 items in turn"):
        within_environment(tmp_path, use, "many_turns.py:Invented", tries=1)  # its first item has none
    assert within_environment(tmp_path, use, "many_turns.py:Invented", tries=2)


def test_a_group_with_images_is_refused(tmp_path: Path, words: Path) -> None:
    source = (FILES / "one_turn.py").read_text()
    (tmp_path / "seen.py").write_text(
        source.replace("scores=[])", "scores=[], images=IMAGES)").replace("class", "IMAGES = [['x']]\n\n\nclass", 1)
    )
    (tmp_path / "unseen.py").write_text((tmp_path / "seen.py").read_text().replace("[['x']]", "[None, []]"))

    async def use(environment: AtroposlibEnvironment, policy: Any) -> Group:
        return await group_of(environment, policy)

    found = {"someone/words": str(words)}
    with pytest.raises(DataError, match="groups have images"):
        within_environment(tmp_path, use, str(tmp_path / "seen.py"), datasets=found)
    assert within_environment(tmp_path, use, str(tmp_path / "unseen.py"), datasets=found)


def test_a_setup_that_never_ends_is_given_up(tmp_path: Path) -> None:
    async def use(environment: AtroposlibEnvironment, policy: Any) -> None: ...

    with pytest.raises(DeadlineExceeded, match=r"open_environment\(\) gave no answer within 0.5 s"):
        within_environment(tmp_path, use, "many_turns.py:Slow", open_deadline_s=0.5)


def test_a_deterministic_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="deterministic cannot hold"):
        AtroposlibEnvironment(AtroposlibOptions(file="x.py"), RunContext(tmp_path, TOY_MODEL, deterministic=True))


def test_the_tiny_loop_trains_on_an_unmodified_file(
    tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FILES)
    result = atropos_core.run(
        environment="atroposlib:./one_turn.py:Letters",
        model="toy",
        steps=3,
        directory=tmp_path / "run",
        set={
            "engine.use": "toy", "trainer.use": "toy", "bridge.use": "local", "environment.letters.datasets": {"someone/words": str(words)},
            "training.groups_per_step": 2, "training.group_size": 4, "evaluation.problems": 1,
        },
    )  # fmt: skip
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert result.steps == 3
    assert steps[0]["eval/percent_correct"] == 0.25
    assert any("environment/letters/train/letters" in step for step in steps)
    assert steps[-1]["environment/letters/sequences_without_logprobs"] == 0

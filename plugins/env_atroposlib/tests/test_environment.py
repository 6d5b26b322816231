"""Files in atroposlib's shapes, each in a real, separate process, sampled from the toy engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atropos_core
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.errors import AtroposError, ConfigError, DataError, DeadlineExceeded, RemoteError
from atropos_core.plugins.provider import RunContext
from atropos_core.rollouts.runner import checked_episode
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Completion, Episode, Failed
from atropos_env_atroposlib.environment import AtroposlibEnvironment
from atropos_env_atroposlib.matching import Matcher, Sampled
from atropos_env_atroposlib.options import AtroposlibOptions
from plugins.env_atroposlib.tests.hosted import FILES, N, group_of, within_environment

Group = list[Episode]


@pytest.fixture
def words(tmp_path: Path) -> Path:
    rows = [json.dumps({"question": f"word {number}"}) for number in range(5)]
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(rows))
    return folder


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


def test_a_sequence_without_a_reply_of_which_the_prompt_is_to_be_trained_is_a_failure(tmp_path: Path) -> None:
    async def use(environment: AtroposlibEnvironment, policy: Any) -> tuple[list[Any], dict[str, float]]:
        task = environment.tasks("train")[0]
        return list(await environment.rollout_group(task, policy, N, seeds=range(N))), environment.metrics()

    (unanswered, *others), metrics = within_environment(tmp_path, use, "sending.py:Unanswered")
    assert unanswered == Failed(
        "sequence 0 has no reply: what is to be trained of it is part of a prompt", "rollout_group"
    )
    assert [one.score for one in others] == [1.0, 2.0, 3.0]
    assert all(one.rollouts[0].logprobs is not None for one in others)
    assert (metrics["sequences_of_prompts"], metrics["sequences_without_logprobs"]) == (1, 0)


def test_the_beginning_of_a_reply_that_is_encoded_again_is_no_prompt() -> None:
    def ids(text: str) -> Any:
        return np.array([ord(one) for one in text], np.int32)

    sampled = Sampled()
    reply = ids("four")
    sampled.add(ids("2 + 2 is "), Completion(reply, -np.ones(4, np.float32), np.zeros(4, np.int32), "stop", 1.0))
    matcher = Matcher(lambda tokens: "".join(map(chr, tokens)))
    tokens = ids("2+2 is fo")
    group = {
        "tokens": [tokens, tokens],
        "masks": [np.where(np.arange(9) < 7, -100, tokens), np.where(np.arange(9) < 7, tokens, -100)],
        "scores": [1, 0],
    }
    cut, of_the_prompt = matcher.episodes(group, sampled)
    assert isinstance(cut, Episode)
    assert cut.rollouts[0].logprobs is None
    assert isinstance(of_the_prompt, Failed)
    assert (matcher.counts.without_logprobs, matcher.counts.of_prompts) == (1, 1)


def test_a_file_that_sends_as_a_step_begins_gives_its_sequences_in_one_group(tmp_path: Path) -> None:
    async def use(environment: AtroposlibEnvironment, policy: Any) -> tuple[list[Any], list[Any]]:
        return await group_of(environment, policy, 0, 2), await group_of(environment, policy, 1, 3)

    first, second = within_environment(tmp_path, use, "sending.py:Sending")
    text = ChatTokenizer(TOY_MODEL).decode
    found = [text(one.rollouts[0].tokens) for one in (*first, *second) if isinstance(one, Episode)]
    assert found == ["text 1", "text 2", "text 4", "text 5", "text 6"], "every draw has what it sends then"
    assert all(one.rollouts[0].sft and not one.rollouts[0].sampled.any() for one in (*first, *second))


def test_what_is_scored_and_postprocessed_may_be_a_pair_and_what_is_sent_besides_is_another_group(
    tmp_path: Path,
) -> None:
    async def use(environment: AtroposlibEnvironment, policy: Any) -> tuple[Group, Group, Group]:
        return (
            await group_of(environment, policy, 0),
            await group_of(environment, policy, 1),
            await group_of(environment, policy, 2),
        )

    given, sent, later = within_environment(tmp_path, use, "sending.py:Pairing")
    text = ChatTokenizer(TOY_MODEL).decode
    for group, prompt, scores in (
        (given, "item 1:", [0, 1, 2, 3]),
        (sent, "item 1:", [7] * N),
        (later, "item 10:", [0, 1, 2, 3]),
    ):
        assert [one.score for one in group] == scores
        assert all(text(one.rollouts[0].tokens).startswith(prompt) for one in group)
        assert all(one.rollouts[0].logprobs is not None for one in group)


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
    assert state == {"step": 3, "data": {"iter": 5}}, "no item of a group that was given comes again"
    assert "word 4" in text


def test_its_own_evaluation_is_one_test_task(tmp_path: Path, words: Path) -> None:
    async def use(environment: AtroposlibEnvironment, policy: Any) -> Any:
        [task] = environment.tasks("test")
        [episode] = await environment.rollout_group(task, policy, 1, seeds=[7])
        return checked_episode(episode)  # type: ignore[arg-type]

    episode = within_environment(tmp_path, use, "one_turn.py", datasets={"someone/words": str(words)})
    assert dict(episode.metrics) == {"percent_correct": 0.25, "environment_accuracy": 0.5, "asked": 2.0}
    assert episode.score == 0.5
    assert len(episode.rollouts) == 2


@pytest.mark.parametrize(
    ("file", "options", "error"),
    [
        ("many_turns.py", {}, "has 6 environments .* but one is run"),
        ("many_turns.py:Nobody", {}, "has no environment 'Nobody'"),
        ("nothing.py", {}, "nothing.py does not exist"),
        ("one_turn.py", {"config": {"leter": "b"}}, "config.leter is not a field of LettersConfig"),
        ("one_turn.py", {"datasets": {"someone/words": "/nowhere"}}, "should be at /nowhere"),
        ("needs.py:Needs", {}, "imports 'surely_not_there', which is not installed"),
        (
            "needs_another.py:Needs",
            {},
            "imports 'json.surely_not_there', which the 'json' that is installed does not have",
        ),
        ("many_turns.py:Late", {}, "Late imports 'surely_not_there', which is not installed"),
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


def test_a_configuration_may_be_named_in_init_alone_and_what_is_logged_knows_its_item(tmp_path: Path) -> None:
    async def use(environment: AtroposlibEnvironment, policy: Any) -> Group:
        return await group_of(environment, policy)

    assert len(within_environment(tmp_path, use, "many_turns.py:Late", config={"module": ""})) == N


def test_a_reply_ends_behind_the_token_that_completes_the_first_stop_text(tmp_path: Path) -> None:
    async def use(environment: AtroposlibEnvironment, policy: Any) -> Group:
        ids = ChatTokenizer(TOY_MODEL).encode("one two four five six")

        async def scripted(prompt: Any, *, n: int, **more: Any) -> list[Completion]:
            zeros = np.zeros(len(ids), np.int32)
            return [Completion(ids, -np.arange(len(ids), dtype=np.float32), zeros, "length", 1.0) for _ in range(n)]

        policy.sample = scripted
        return await group_of(environment, policy)

    for episode in within_environment(tmp_path, use, "stopping.py"):
        [rollout] = episode.rollouts
        assert ChatTokenizer(TOY_MODEL).decode(rollout.tokens[rollout.trained]) == "one two four"
        assert rollout.logprobs is not None
        assert rollout.logprobs[rollout.trained].tolist() == [-float(at) for at in range(int(rollout.trained.sum()))]
        assert episode.score == 1.0, "the file is shown what stands before it"


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
    with pytest.raises(ConfigError, match="cannot be deterministic"):
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


@pytest.mark.parametrize(("mask", "says"), [(-100, "each is masked"), (1, "is its id, but here it is 1")])
def test_a_sequence_without_a_token_to_train_says_what_its_masks_are(mask, says):
    group = {"tokens": [[5, 6]], "masks": [[mask, mask]], "scores": [0.0]}
    with pytest.raises(DataError, match=f"sequence 0 of a group has no token to train: .*{says}"):
        Matcher(str).episodes(group, Sampled())


def test_tools_that_the_chat_template_leaves_out_are_an_error(tmp_path: Path) -> None:
    source = (FILES / "many_turns.py").read_text()
    tools = (
        '[{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]'
    )
    (tmp_path / "with_tools.py").write_text(source.replace("messages=chat, n=1", f"messages=chat, tools={tools}, n=1"))

    async def use(environment: AtroposlibEnvironment, policy: Any) -> Group:
        return await group_of(environment, policy)

    with pytest.raises(AtroposError, match="the model's chat template leaves the definitions of the tools out"):
        within_environment(tmp_path, use, str(tmp_path / "with_tools.py:Managed"))

"""Groups annotated by the policy itself, on a real engine, and weights that come from real checkpoints."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from atropos_core.errors import ConfigError, DeadlineExceeded, FitError
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.model_provider import Workload
from atropos_core.plugins.provider import RunContext
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.storage.checkpoint import Checkpoints
from atropos_core.training.batch import to_batch
from atropos_core.types import Draw, Episode, Rollout, ScoredGroup, Task, TopK
from atropos_distillation.config import SelfOptions
from atropos_distillation.lessons import lessons_of
from atropos_distillation.plugin import build_self, engine_role, holds_self, policy_context

PLAIN = {"template": "{problem} So: {shown}", "solution": "{shown}", "feedback": "told {shown}"}
TASK = Task("t", ({"role": "user", "content": "Ann has 5 pins and buys 2 more. How many pins?"},), "#### 7")


@pytest.fixture(scope="module")
def tiny():
    return load_plugins().resolve_model("tiny").directory


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return ChatTokenizer(tiny)


def rollout(tokenizer, reply, version=0, temperature=1.0):
    prompt, said = tokenizer.render(TASK.messages), np.append(tokenizer.encode(reply), 1).astype(np.int32)
    tokens = np.concatenate([prompt, said]).astype(np.int32)
    sampled = np.arange(len(tokens)) >= len(prompt)
    trained = sampled.copy()
    trained[len(prompt) + 1] = trained[-1] = False  # of a tool, and after what the loss counts
    return Rollout(
        tokens, sampled, trained, np.where(sampled, -1, 0).astype(np.float32),
        np.where(sampled, version, 0).astype(np.int32), temperature,
    )  # fmt: skip


def group(tokenizer, *replies, version=0, temperature=1.0, told=()):
    """Of (reply, reward)."""
    episodes = tuple(
        Episode(
            (rollout(tokenizer, reply, version, temperature),), reward,
            messages=(*TASK.messages, {"role": "assistant", "content": reply}, *told),
        )
        for reply, reward in replies
    )  # fmt: skip
    rewards = np.array([reward for _, reward in replies], np.float32)
    return ScoredGroup(Draw(0, "gsm8k", "train", 0, 0), TASK, episodes, rewards)


def context(folder, tiny, **announced):
    return RunContext(folder, tiny, label="teacher.me", announced={"distillation": "reverse", **announced}, threads=1)


async def opened(options, context):
    teacher = build_self(SelfOptions(**{**PLAIN, **options}), context)
    await teacher.open()
    return teacher


def logprobs_of(model, tokens, temperature=1.0):
    """[T, V] in float64: row t predicts token t."""
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].double() / temperature
    return torch.cat([torch.full((1, logits.shape[1]), torch.nan), logits[:-1].log_softmax(-1)])


def shown_to(tokenizer, options, *replies, told=()):
    """The user's message that the teacher of each rollout reads; None for one that is not taught."""
    made = group(tokenizer, *replies, told=told)
    lessons, left_out = lessons_of(made, SelfOptions(**{**PLAIN, **options}), tokenizer, 1024)
    assert left_out == 0
    found = {id(one.rollout): tokenizer.decode(one.tokens[: one.before]) for one in lessons}
    return [found.get(id(episode.rollouts[0])) for episode in made.episodes]


@pytest.mark.parametrize("kind", ["reverse", "forward"])
async def test_each_token_has_what_the_policy_says_of_it_after_the_shown_reply_and_stays_as_it_was_sampled(
    tiny, tokenizer, tmp_path, kind
):
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    for temperature in (1.0, 0.7):
        given = group(
            tokenizer, ("#### 9", 0.0), ("Ann has 5+2=7.\n#### 7", 1.0), ("Ann has", 0.0), temperature=temperature
        )
        options = {"shows": ["sibling"], "top_k": 5}
        teacher = await opened(options, context(tmp_path, tiny, distillation=kind))
        try:
            (made,) = await teacher.annotate([given])
        finally:
            await teacher.close()
        assert made.episodes[1].rollouts[0].teacher is None, "no other one succeeded"
        told = [{"role": "user", "content": f"{TASK.messages[0]['content']} So: Ann has 5+2=7.\n#### 7"}]
        prompt = tokenizer.render(told)
        for at in (0, 2):
            before, after = given.episodes[at].rollouts[0], made.episodes[at].rollouts[0]
            np.testing.assert_array_equal(before.tokens, after.tokens)
            start = int(np.flatnonzero(before.sampled)[0])
            logs = logprobs_of(model, np.concatenate([prompt, before.tokens[start:]]), temperature)
            entries = 1 if kind == "reverse" else 5
            np.testing.assert_array_equal(np.diff(after.teacher.offsets), entries * before.trained)
            for position in np.flatnonzero(before.trained):
                row = logs[position - start + len(prompt)]
                said = slice(after.teacher.offsets[position], after.teacher.offsets[position + 1])
                ids = [before.tokens[position]] if kind == "reverse" else row.topk(5).indices.tolist()
                assert after.teacher.token_ids[said].tolist() == ids
                np.testing.assert_allclose(after.teacher.logprobs[said], row[ids], atol=2e-5)
        assert teacher.metrics()["rollouts"] == 2 and teacher.metrics()["versions_behind"] == 0


def test_a_rollout_is_shown_the_next_one_that_succeeded_and_never_itself(tokenizer):
    replies = [("#### 1", 0.0), ("#### 7", 1.0), ("#### 3", 0.0), ("a #### 7", 1.0)]
    shown = shown_to(tokenizer, {"shows": ["sibling"]}, *replies)
    assert [text.rpartition("So: ")[2] for text in shown] == ["#### 7", "a #### 7", "a #### 7", "#### 7"]
    assert shown_to(tokenizer, {"shows": ["sibling"]}, ("#### 1", 0.4), ("#### 7", 0.9)) == [None, None]
    assert shown_to(tokenizer, {"shows": ["sibling"], "success": 0.9}, ("#### 1", 0.4), ("#### 7", 0.9))[1] is None
    assert shown_to(tokenizer, {"shows": ["sibling"], "success": 0.9}, ("#### 1", 0.4), ("#### 7", 0.9))[0] is not None


def test_feedback_and_the_answer_stand_where_they_are_and_in_their_order(tokenizer):
    told = ({"role": "tool", "content": "error: 3"}, {"role": "user", "content": "no"})
    both = {"shows": ["answer", "feedback"], "template": "{problem}|{shown}", "solution": "it is {shown}"}
    problem = TASK.messages[0]["content"]
    (shown,) = shown_to(tokenizer, both, ("#### 1", 0.0), told=told)
    assert shown == f"{problem}|it is #### 7\n\ntold error: 3\nno"
    (shown,) = shown_to(tokenizer, {**both, "shows": ["sibling", "feedback"]}, ("#### 1", 0.0), told=told)
    assert shown == f"{problem}|told error: 3\nno", "nobody else succeeded"
    assert shown_to(tokenizer, {"shows": ["feedback"]}, ("#### 1", 0.0)) == [None], "nothing was said"
    hint = {"shows": [], "template": "Rosa {problem}"}
    assert shown_to(tokenizer, hint, ("#### 1", 0.0), ("#### 7", 1.0)) == [f"Rosa {problem}"] * 2


def test_what_brought_a_teacher_or_has_another_prompt_than_the_task_is_left_as_it_is(tokenizer):
    made = group(tokenizer, ("#### 1", 0.0), ("#### 7", 1.0), ("#### 2", 0.0))
    first, second, third = (one.rollouts[0] for one in made.episodes)
    size = len(first.tokens)
    brought = replace(first, teacher=TopK(np.zeros(size + 1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32)))
    other = replace(third, tokens=np.where(np.arange(len(third.tokens)) == 1, 9, third.tokens).astype(np.int32))
    episodes = tuple(
        replace(one, rollouts=(each,)) for one, each in zip(made.episodes, (brought, second, other), strict=True)
    )
    lessons, left_out = lessons_of(replace(made, episodes=episodes), SelfOptions(shows=("sibling",)), tokenizer, 1024)
    assert (lessons, left_out) == ([], 1)


async def test_a_step_without_lessons_has_a_teacher_without_logprobs(tiny, tokenizer, tmp_path):
    teacher = await opened({"shows": ["sibling"]}, context(tmp_path, tiny))
    try:
        made = await teacher.annotate([group(tokenizer, ("#### 1", 0.0), ("#### 2", 0.0)) for _ in range(2)])
    finally:
        await teacher.close()
    batch = to_batch([one.with_advantages(one.rewards) for one in made], 1)
    assert not len(batch.ragged["teacher_token_ids"].values)
    assert (teacher.metrics()["rollouts"], teacher.metrics()["left_out"]) == (0, 0)


async def test_a_lesson_beyond_the_models_context_is_left_out_and_counted(tiny, tokenizer, tmp_path):
    long = "1+1=2 " * 140
    replies = [(f"{long}#### 1", 0.0), (f"{long}#### 7", 1.0), ("#### 3", 0.0)]
    made = group(tokenizer, *replies)
    assert max(len(one.rollouts[0].tokens) for one in made.episodes) < 1024
    teacher = await opened({"shows": ["sibling"]}, context(tmp_path, tiny))
    try:
        (taught,) = await teacher.annotate([made])
    finally:
        await teacher.close()
    assert [one.rollouts[0].teacher is not None for one in taught.episodes] == [False, False, True]
    assert (teacher.metrics()["rollouts"], teacher.metrics()["left_out"]) == (1, 1)


async def test_it_teaches_with_the_policy_of_the_version_that_was_sampled(tiny, tokenizer, tmp_path):
    """Two real checkpoints: no rollout has been sampled yet from the version of the newer one."""
    models = {}
    for version, scale in ((1, 0.9), (2, 0.8)):
        models[version] = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
        with torch.no_grad():
            models[version].model.norm.weight.mul_(scale)

        async def write(directory, model=models[version]):
            model.save_pretrained(directory)
            shutil.copy(tiny / "tokenizer.json", directory)

        await Checkpoints(tmp_path / "checkpoints").save(version + 3, {"progress": {"version": version}}, write)
    teacher = await opened({"shows": ["answer"]}, context(tmp_path, tiny))
    try:
        for version in (1, 2, 1):
            (made,) = await teacher.annotate([group(tokenizer, ("#### 9", 0.0), version=version)])
            after = made.episodes[0].rollouts[0]
            ((lesson,), _) = lessons_of(
                group(tokenizer, ("#### 9", 0.0)), SelfOptions(**PLAIN, shows=("answer",)), tokenizer, 1024
            )
            logs = logprobs_of(models[version], lesson.tokens)
            own = logs[np.arange(len(lesson.tokens)), lesson.tokens][lesson.before :]
            trained = after.trained[lesson.start :][: len(own)]
            np.testing.assert_allclose(after.teacher.logprobs, own[trained], atol=2e-5)
            assert teacher.metrics()["versions_behind"] == 0
        with pytest.raises(
            ConfigError, match=r"of version 4, and the newest policy saved is of version 2(.|\n)*checkpoint.every=1"
        ):
            await teacher.annotate([group(tokenizer, ("#### 9", 0.0), version=4)])
    finally:
        await teacher.close()


async def test_weights_that_may_be_behind_are_kept_while_they_are_near_enough(tiny, tokenizer, tmp_path):
    teacher = await opened({"shows": ["answer"], "versions_behind": 3}, context(tmp_path, tiny))
    try:
        for version in (0, 3):
            await teacher.annotate([group(tokenizer, ("#### 9", 0.0), version=version)])
            assert teacher.metrics()["versions_behind"] == version
        with pytest.raises(ConfigError, match=r"more of teacher\.me\.versions_behind"):
            await teacher.annotate([group(tokenizer, ("#### 9", 0.0), version=4)])
    finally:
        await teacher.close()


def test_the_engine_is_the_one_that_is_named_on_the_devices_that_are_named(tiny, tmp_path):
    assert SelfOptions(engine={"use": "toy"}).resolved_engine().offer.provider.name == "toy"
    options = SelfOptions(engine={"use": "hf", "devices": ["cuda:1"]})
    inside = policy_context(options, context(tmp_path, tiny))
    assert (inside.devices, inside.transport) == (("cuda:1",), "checkpoint")
    assert engine_role(options, "teacher.me") == {"teacher-me": ("cuda:1",)}
    assert policy_context(SelfOptions(engine={"use": "hf", "threads": 3}), context(tmp_path, tiny)).threads == 3


async def test_what_does_not_come_within_the_deadline_ends_the_step(tiny, tokenizer, tmp_path):
    teacher = await opened({"shows": ["answer"], "deadline_s": 1e-6, "engine": {"use": "toy"}}, context(tmp_path, tiny))
    try:
        with pytest.raises(DeadlineExceeded, match=r"teacher\.me: 1 groups"):
            await teacher.annotate([group(tokenizer, ("#### 9", 0.0))])
    finally:
        await teacher.close()


def test_the_memory_plan_counts_a_second_copy_of_the_policy(tiny, tmp_path):
    load = Workload(context(tmp_path, tiny), groups=2, group_size=8, max_tokens=64, concurrent_rollouts=16)
    held = list(holds_self(SelfOptions(engine={"use": "hf", "devices": ["cuda:1"]}), load))
    assert sum(one.size_bytes for one in held if one.device == "cuda:1") >= 2 * 766_080


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"announced": {"distillation": None}}, r"\[trainer\.distillation\] is unset"),
        ({"transport": "adapter"}, "this run trains an adapter"),
    ],
    ids=str,
)
def test_a_run_that_it_cannot_teach_is_refused_before_anything_starts(tiny, tmp_path, changed, said):
    with pytest.raises(FitError, match=said):
        build_self(SelfOptions(), replace(context(tmp_path, tiny), **changed))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"template": "{problem}"}, "template lacks {shown}"),
        ({"shows": []}, "template has {shown}, and shows = "),
        ({"solution": "so"}, "solution lacks {shown}"),
        ({"feedback": "{shown} {text}"}, "feedback cannot be filled in: KeyError"),
        ({"template": "{shown"}, "template cannot be filled in: ValueError"),
        ({"shows": ["hint"]}, "'sibling', 'answer' or 'feedback'"),
    ],
    ids=str,
)
def test_templates_that_would_show_nothing_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        SelfOptions(**options)

"""Numbers about replies, and the one check that names the cause when several look wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from atropos_core.config.health_options import HealthSection
from atropos_core.health.check import Change, Settings
from atropos_core.health.checks import BEFORE_TRAINING, checks, judge
from atropos_core.health.replies import Reply, example, measure_replies, needed_tokens, recorded_replies, replies
from atropos_core.health.watch import with_example
from atropos_core.rollouts.evaluation import Evaluation
from atropos_core.training.metrics import group_metrics
from atropos_core.types import ScoredGroup
from tests.unit.health.test_checks import healthy
from tests.unit.parts import episode, group, rollout


def of(
    *texts: str, rewards: tuple[float, ...] = (), answer: str | None = None, finish: str = "stop", **metrics: float
) -> ScoredGroup:
    given = rewards or (0.0,) * len(texts)
    made = group(0, given)
    episodes = tuple(
        episode(reward, text, rollout(sampled=6), finish=finish, metrics=metrics)
        for text, reward in zip(texts, given, strict=True)
    )
    return replace(made, episodes=episodes, task=replace(made.task, answer=answer))


@pytest.mark.parametrize(
    ("text", "header"),
    [
        ("It is 4.\n### User:\nAnd 5?", "### User:"),
        ("4\nuser\nWhat about 7?", "user"),
        ("4<|im_start|>user", "<|im_start|>"),
        ("The answer is 4.\n\nQuestion: what is 5 + 5?", "Question:"),
        ("4\nHuman: thanks", "Human:"),
        ("4 [INST] more", "[INST]"),
        ("The user pays 4 dollars.", ""),
        ("Question 3 asks for the system: it has 4 inputs.", ""),
        ("I answer the question:\n4", ""),
        ("## Input sizes\nThey are 4.", ""),
    ],
)
def test_the_header_of_another_turn_is_found_and_the_same_words_in_a_sentence_are_not(text, header):
    [one] = replies([of(text)])
    assert one.header == header


def test_shares_are_of_all_replies():
    found = measure_replies([of("", " \n", "4\nuser\nmore", "4")])
    assert (found["replies/empty"], found["replies/other_turn"]) == (0.5, 0.25)


def test_a_reply_that_a_client_sent_as_tokens_alone_is_not_called_empty():
    sent = of("4", "4")
    sent = replace(sent, episodes=tuple(replace(one, messages=()) for one in sent.episodes))
    assert measure_replies([sent])["replies/empty"] == 0.0


def tokens_of(*ids: int, finish: str = "length") -> ScoredGroup:
    made = group(0, (0.0,))
    values = rollout(prompt=2, sampled=len(ids))
    one = replace(values, tokens=np.array([1, 2, *ids], np.int32))
    return replace(made, episodes=(episode(0.0, "x", one, finish=finish),))


@pytest.mark.parametrize(
    ("ids", "loops"),
    [
        ([9, 8, 7, 6, 5, 4, 5, 4, 5, 4], True),
        ([9, 4, 4, 4], True),
        ([3, 1, 2, 3, 1, 2, 3, 1, 2, 3], True),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], False),
        ([5, 4, 5, 4, 9], False),
        ([], False),
    ],
)
def test_a_reply_that_is_cut_off_while_it_repeats_a_passage_is_counted(ids, loops):
    assert measure_replies([tokens_of(*ids)])["replies/looping"] == float(loops)
    assert measure_replies([tokens_of(*ids, finish="stop")])["replies/looping"] == 0.0


def test_needed_tokens_are_the_censored_estimate():
    """Of exponential lengths of which a part is cut off, the estimate is the true quantile, within sampling error."""
    lengths = np.random.default_rng(0).exponential(300.0, 4000)
    made = [tokens_of(*([0] * int(min(n, 128))), finish="length" if n > 128 else "stop") for n in lengths]
    assert measure_replies(made[:64])["replies/needed_tokens"] > 256
    assert needed_tokens([one.episodes[0] for one in made]) == pytest.approx(300 * np.log(5), rel=0.06)


def test_right_answers_that_earn_nothing_are_counted_and_others_are_not():
    texts = ("So the answer is 18.", "18 dollars", "It is 180", "It is 1.18", "18.5", "seven")
    assert measure_replies([of(*texts, answer="9 + 9\n#### 18")])["replies/right_unscored"] == pytest.approx(2 / 6)
    assert "replies/right_unscored" not in measure_replies([of("18", "7", rewards=(1.0, 0.0), answer="18")])
    assert measure_replies([of("x", "y", accuracy_lenient=1.0)])["replies/right_unscored"] == 1.0


def test_reward_and_length_are_correlated_within_groups_not_between_them():
    def sized(rewards: tuple[float, ...], lengths: tuple[int, ...]) -> ScoredGroup:
        made = group(0, rewards)
        return replace(made, episodes=tuple(episode(0.0, "x", rollout(sampled=n)) for n in lengths))

    pays = [sized((0.1, 0.2, 0.3), (10, 20, 30)), sized((0.5, 0.4, 0.3), (50, 40, 30))]
    assert measure_replies(pays)["reward/length_correlation"] == pytest.approx(1.0)
    apart = [sized((0.0, 0.0), (10, 20)), sized((1.0, 1.0), (100, 110))]
    assert "reward/length_correlation" not in measure_replies(apart)


def test_records_of_steps_and_evaluations_give_the_same_replies(tmp_path):
    made = of("So it is 18", "", rewards=(0.5, 0.0), answer="#### 18", answered=1.0)
    Evaluation({}, {}, (made,), 1.0, 1).write(tmp_path / "eval.jsonl")
    read = recorded_replies(json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines())
    assert [replace(one, answer="") for one in replies([made])] == read, "the answer is not in that file"
    assert recorded_replies([{"failed": "no", "where": "reward"}, {}, {"samples": [{"finish": 1}]}]) == []


def reply(text: str, **values: object) -> Reply:
    found = {
        "calls": False,
        "cut_off": False,
        "reward": 0.0,
        "correct": None,
        "metrics": {},
        "answer": "",
        "environment": "words",
    }
    return Reply(text, **(found | values))  # type: ignore[arg-type]


def test_a_finding_quotes_a_reply_that_shows_it_and_its_remedy_names_that_text():
    found = [reply("fine"), reply("4\n### User:\nand  5?")]
    shown = with_example(Change(1, "chat_template", "ill", 1, "x", "set [HEADER]."), found, {})
    assert shown.says == 'x. One reply ends: "4 ### User: and 5?"'
    assert shown.remedy == 'set ["\\n### User:"].'
    stated = with_example(
        Change(1, "answer_format", "ill", 1, "x", "Do. FORMAT End."), found, {"words": "see {name}.pattern"}
    )
    assert stated.remedy == "Do. see words.pattern End."
    unknown = with_example(Change(1, "chat_template", "ill", 1, "x", "set [HEADER]. FORMAT"), [], {})
    assert (unknown.says, unknown.remedy) == ("x", 'set ["\\nUser:"].')
    cut = example("cut_off", [reply("whole"), reply("a" * 300, cut_off=True)])
    assert cut is not None and cut.end == '"...' + "a" * 100 + '"'
    assert example("throughput", found) is None and example("cut_off", []) is None


# -- one cause

CUT = {
    "rollouts/cut_off": 0.94,
    "rollouts/cut_off_lowest": 0.94,
    "reward/std": 0.0,
    "reward/mean": 0.0,
    "replies/answered": 0.0,
}


def ill_after(numbers: dict[str, float], *, step: int = 0, run: Settings | None = None) -> list[Change]:
    every = checks(HealthSection(), run)
    seen = healthy(1) | numbers | ({BEFORE_TRAINING: 1.0} if step == 0 else {})
    return [change for change in judge(every, step, seen) if change.state == "ill"]


@pytest.mark.parametrize(
    ("numbers", "cause"),
    [
        (CUT, "cut_off"),
        (CUT | {"replies/other_turn": 0.8}, "chat_template"),
        ({"reward/std": 0.0, "reward/mean": 0.0, "replies/answered": 0.0}, "answer_format"),
        ({"reward/std": 0.0, "reward/mean": 0.0}, "reward_collapse"),
        ({"replies/empty": 0.9, "reward/std": 0.0, "replies/answered": 0.0}, "chat_template"),
    ],
)
def test_the_evaluation_before_training_names_one_cause_at_once(numbers, cause):
    assert [change.check for change in ill_after(numbers)] == [cause]
    assert ill_after({}) == [], "healthy"


def test_empty_replies_are_not_told_to_end_at_a_text():
    [empty], [other] = ill_after({"replies/empty": 0.9}), ill_after({"replies/other_turn": 0.9})
    assert "sampling.stop" not in empty.remedy and "add HEADER to sampling.stop" in other.remedy


def test_a_few_replies_are_too_few_to_judge_by_before_training():
    assert ill_after(CUT | {"rollouts/count": 15.0}) == []
    assert [change.check for change in ill_after(CUT | {"rollouts/count": 16.0})] == ["cut_off"]
    assert ill_after({"reward/std": 0.0, "rollouts/count": 31.0}) == []
    assert ill_after({"reward/std": 0.0, "reward/mean": 1.0, "accuracy": 1.0}) == [], "solved"


@pytest.mark.parametrize(("needed", "number"), [(10.0, "64"), (100.0, "128"), (1e9, "256"), (None, "64")])
def test_the_number_of_tokens_in_the_remedy_follows_the_lengths(needed, number):
    more = {} if needed is None else {"replies/needed_tokens": needed}
    [change] = ill_after(CUT | more, run=Settings(32))
    assert "sampling.max_tokens = 32" in change.says
    assert f"raise sampling.max_tokens to {number}" in change.remedy
    [own] = ill_after(CUT | more, run=Settings(32, 16))
    assert "evaluation.max_tokens = 16" in own.says
    [step] = [one for one in ill_after(CUT | more, step=1, run=Settings(32, 16)) if one.check == "cut_off"]
    assert "sampling.max_tokens = 32" in step.says


@pytest.mark.parametrize(
    ("context", "prompt", "said"),
    [
        (0, 100.0, "raise sampling.max_tokens to 256."),
        (356, 100.0, "raise sampling.max_tokens to 256."),
        (355, 100.0, "raise sampling.max_tokens to 255, all that the model's context of 355 tokens leaves."),
        (132, 100.0, "the model's context of 132 tokens leaves no room for longer ones"),
    ],
)
def test_the_number_of_tokens_in_the_remedy_fits_the_models_context(context, prompt, said):
    numbers = CUT | {"replies/needed_tokens": 1e9, "replies/prompt_tokens": prompt}
    [change] = ill_after(numbers, run=Settings(32, context_tokens=context))
    assert said in change.remedy, change.remedy
    assert ("raise" in change.remedy) == (context != 132)


def test_a_prompt_is_what_comes_before_the_last_reply():
    assert measure_replies([tokens_of(5, 6)])["replies/prompt_tokens"] == 2
    made = tokens_of(5, 6, 7, 8, 9)
    [one] = made.episodes
    turns = replace(one.rollouts[0], sampled=np.array([False, False, True, True, False, True, True]))
    assert measure_replies([replace(made, episodes=(replace(one, rollouts=(turns,)),))])["replies/prompt_tokens"] == 5
    assert "replies/prompt_tokens" not in measure_replies([tokens_of(5, 6, finish="stop")])


def test_what_was_so_before_training_is_not_said_again_and_gets_well_in_training():
    every = checks(HealthSection())
    assert judge(every, 0, healthy(0) | CUT | {BEFORE_TRAINING: 1.0})
    assert [change for change in judge(every, 1, healthy(1) | CUT) if change.check != "not_finite"] == []
    assert [(change.check, change.state) for change in judge(every, 2, healthy(2))] == [("cut_off", "ok")]


@pytest.mark.parametrize(
    ("steps", "named_at"),
    [  # reward, entropy, looping, how far the probe is after the step
        ([(0.42, 1.3, 0.0, 26.9), (0.13, 1.0, 0.5, 27.7)], 2),  # SmolLM2-135M at 1e-2: "to to to to"
        ([(0.47, 0.18, 0.0, 104.0), (0.0, 0.23, 0.5, 104.0)], 2),  # tiny at 1
        ([(0.4, 1.0, 0.0, 8.0), (0.4, 6.0, 0.0, 8.0)], 2),
        (
            [(0.03, 0.9, 0.0, 10.5), (0.07, 0.9, 0.0, 12.6), (0.25, 0.66, 0.0, 13.3), (0.5, 0.46, 0.6, 13.1)],
            None,
        ),  # it learns to be long
        ([(0.6, 3.6, 0.0, 16.8), (1.0, 0.0, 0.9, 16.9)], None),  # it found one reply that earns all
        ([(0.4, 1.0, 0.0, 0.5), (0.1, 1.0, 0.0, 1.0)], None),
        ([(0.4, 1.0, 0.0, 8.0), (0.1, 1.1, 0.0, 8.1)], None),  # harder tasks
    ],
)
def test_an_update_after_which_replies_are_garbage_is_named_at_the_next_step(steps, named_at):
    [check] = [check for check in checks(HealthSection()) if check.name == "broken_policy"]
    ill = None
    for step, (reward, entropy, looping, shift) in enumerate(steps, 1):
        seen = {
            "reward/mean": reward,
            "entropy/sampled": entropy,
            "replies/looping": looping,
            "policy/probe_shift_nats": shift,
        }
        change = check.look(step, seen | {"learning_rate": 0.01})
        ill = change if change is not None and change.state == "ill" else ill
    assert (None if ill is None else ill.step) == named_at
    if ill is not None:
        assert "the learning rate is 0.01" in ill.says and "trainer.learning_rate to 0.0001 or less" in ill.remedy


@pytest.mark.parametrize(
    ("steps", "named_at"),
    [  # reward, tokens, correlation, accuracy
        ([(0.03, 3.5, 0.77, None), (0.07, 8.8, 0.99, None), (0.25, 33, 0.92, None), (0.5, 96, None, None)], 4),
        ([(0.1, 50, 0.9, 0.1), (0.2, 80, 0.9, 0.1), (0.3, 90, 0.9, 0.12), (0.4, 100, 0.9, 0.1)], 4),
        ([(0.1, 50, 0.9, 0.1), (0.2, 80, 0.9, 0.2), (0.3, 90, 0.9, 0.3), (0.4, 100, 0.9, 0.4)], None),  # it learns
        ([(0.1, 50, 0.4, None), (0.2, 80, 0.4, None), (0.3, 90, 0.4, None), (0.4, 100, 0.4, None)], None),
        ([(0.4, 50, -0.9, None), (0.5, 80, -0.9, None), (0.6, 90, -0.9, None), (0.7, 100, -0.9, None)], None),
        ([(0.1, 50, 0.9, None), (0.2, 52, 0.9, None), (0.3, 50, 0.9, None), (0.4, 51, 0.9, None)], None),
    ],
)
def test_a_reward_that_only_grows_with_length_is_named(steps, named_at):
    [check] = [check for check in checks(HealthSection()) if check.name == "length_reward"]
    ill = None
    for step, (reward, tokens, correlation, accuracy) in enumerate(steps, 1):
        given = {"reward/length_correlation": correlation, "accuracy": accuracy}
        seen = {"reward/mean": reward, "tokens/mean": tokens} | {
            name: one for name, one in given.items() if one is not None
        }
        change = check.look(step, seen)
        ill = change if change is not None and change.state == "ill" else ill
    assert (None if ill is None else ill.step) == named_at


def test_numbers_of_groups_are_those_that_the_checks_need():
    found = group_metrics([of("a", "b", finish="length")]) | measure_replies([of("a", "b", finish="length")])
    assert found["rollouts/cut_off"] == 1.0 and found["replies/needed_tokens"] == pytest.approx(12 * np.log(5))

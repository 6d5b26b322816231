"""Values that follow a model's size and kind: which they are, and that presets and users overrule them."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from atropos_core.cli.options import configure
from atropos_core.config.rules import reply_tokens
from atropos_core.launch.banner import by_rule
from atropos_core.launch.plan import make_plan
from atropos_trainer_grpo.config import LORA_RATE
from tests.conftest import REPOSITORY

# hidden sizes as published: SmolLM2-135M, Qwen2.5-0.5B, Qwen3-1.7B, Qwen3-4B, Qwen2.5-7B, Qwen3-8B, Llama-3-70B
WIDTHS = (576, 896, 2048, 2560, 3584, 4096, 8192)
GPU = {"trainer.devices": ["cuda:0"], "engine.devices": ["cuda:0"]}
CPU = {"trainer.devices": ["cpu"], "engine.devices": ["cpu"]}
EARLIER = {  # the options' own defaults
    "sampling.max_tokens": 256, "training.groups_per_step": 16, "evaluation.problems": 512,
    "trainer.learning_rate": 1e-6, "trainer.warmup_steps": 0,
}  # fmt: skip


def model(folder, width, template="{{ messages }}", context=32768, **more):
    folder = folder / f"{width}"
    folder.mkdir(exist_ok=True)
    shape = {"hidden_size": width, "max_position_embeddings": context, "model_type": "qwen2"}
    (folder / "config.json").write_text(json.dumps({**shape, **more}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return str(folder)


def values(loaded):
    """Return each value that a rule may set with its origin; an option of the trainer that nothing sets is missing."""
    found = {path: (value, origin) for path, value, origin in loaded.rows()}
    return {path: found[path] for path in EARLIER if path in found}


@pytest.mark.parametrize(
    ("width", "rate", "tokens"),
    [(576, 2e-6, 256), (896, 2e-6, 256), (1536, 2e-6, 512), (2048, 2e-6, 512), (3584, 1e-6, 1024), (8192, 1e-6, 1024)],
)
def test_learning_rate_and_reply_follow_the_size(tmp_path, width, rate, tokens):
    loaded, _, _ = configure(model=model(tmp_path, width), flags=GPU)
    assert values(loaded) == {
        "sampling.max_tokens": (tokens, "rule"),
        "training.groups_per_step": (16, "default"),
        "evaluation.problems": (512, "default"),
        "trainer.learning_rate": (rate, "rule"),
        "trainer.warmup_steps": (5, "rule"),  # of 100 steps
    }


def test_the_page_has_the_values_of_the_rules(tmp_path):
    page = (REPOSITORY / "docs/defaults.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")
    ]
    shown = {row[0]: row[2:7] for row in rows}
    shapes = ((576, ""), (896, ""), (1536, ""), (2560, "<think>"), (3584, ""))
    for at, (width, template) in enumerate(shapes):
        config = configure(model=model(tmp_path, width, template), flags=GPU)[0].config
        rate = config.trainer.options["learning_rate"]
        assert float(shown["`trainer.learning_rate`"][at]) == rate
        assert float(shown["the rate of an adapter"][at]) == pytest.approx(LORA_RATE * rate)
        assert int(shown["`sampling.max_tokens`"][at]) == config.sampling.max_tokens
        assert int(shown["`training.group_size`"][at]) == config.training.group_size


def test_no_rate_rises_and_no_reply_shrinks_with_the_size(tmp_path):
    found = [values(configure(model=model(tmp_path, width), flags=GPU)[0]) for width in (32, 256, *WIDTHS)]
    rates = [one["trainer.learning_rate"][0] for one in found]
    tokens = [one["sampling.max_tokens"][0] for one in found]
    assert all(larger <= smaller for smaller, larger in pairwise(rates))
    assert all(larger >= smaller for smaller, larger in pairwise(tokens))
    assert (rates[0], rates[-1]) == (2e-6, 1e-6)


def test_a_cpu_has_smaller_steps_and_a_shorter_evaluation_unless_the_model_is_a_toy(tmp_path):
    for width, groups, problems in ((64, 16, 512), (576, 4, 64)):
        config = configure(model=model(tmp_path, width), flags=CPU)[0].config
        assert (config.training.groups_per_step, config.evaluation.problems) == (groups, problems)


@pytest.mark.parametrize(
    ("template", "context", "tokens"),
    [
        ("<think>", 40960, 2048),
        ("<think>", 2048, 1024),
        ("", 40960, 256),
        ("", 128, 64),
    ],
)
def test_replies_follow_the_template_and_leave_half_of_the_context(tmp_path, template, context, tokens):
    loaded, _, _ = configure(model=model(tmp_path, 896, template, context), flags=GPU)
    assert loaded.config.sampling.max_tokens == tokens


def test_without_a_known_context_the_reply_is_the_usual_one():
    assert reply_tokens(896, False, 0) == 256


def test_the_decoder_of_a_model_with_several_parts_counts(tmp_path):
    path = model(tmp_path, 100, hidden_size=None, text_config={"hidden_size": 3584})
    assert configure(model=path, flags=GPU)[0].config.trainer.options["learning_rate"] == 1e-6


def test_the_user_wins_in_each_value_on_its_own(tmp_path):
    path = model(tmp_path, 576)
    for mine, value in {**EARLIER, "trainer.learning_rate": 3e-5, "sampling.max_tokens": 48}.items():
        before = values(configure(model=path, flags=CPU)[0])
        after = values(configure(model=path, flags=CPU, changes=[f"{mine}={value}"])[0])
        assert after == {**before, mine: (value, "flag")}


def test_a_file_wins_over_a_rule(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f'model = "{model(tmp_path, 576)}"\n[trainer]\nlearning_rate = 2e-6\n')
    assert values(configure(file)[0])["trainer.learning_rate"] == (2e-6, str(file))


def test_a_model_with_a_preset_has_no_rules():
    loaded, resolved, _ = configure(env=["gsm8k"], model="tiny")
    assert resolved.preset
    assert "rule" not in {origin for _, _, origin in loaded.rows()}


def test_warm_up_is_a_twentieth_of_the_updates_and_at_most_ten(tmp_path):
    path = model(tmp_path, 576)
    for steps, more, warmup in ((2, [], 0), (40, [], 2), (40, ["trainer.minibatches=4"], 8), (1000, [], 10)):
        config = configure(model=path, steps=steps, changes=more)[0].config
        assert config.trainer.options["warmup_steps"] == warmup


def test_an_adapter_has_ten_times_the_rate(tmp_path):
    loaded, resolved, plugins = configure(model=model(tmp_path, 576), env=["gsm8k"], bridge="lora", flags=CPU)
    assert dict(make_plan(loaded.config, resolved, plugins).notes())["learning rate"].startswith("2e-05, 10 times")


def test_the_first_lines_of_a_run_name_what_follows_a_rule(tmp_path):
    path = model(tmp_path, 576)
    loaded, resolved, plugins = configure(model=path, env=["gsm8k"], flags=CPU, changes=["sampling.max_tokens=48"])
    ((_, said),) = by_rule(make_plan(loaded.config, resolved, plugins))
    assert said.startswith(
        "training.groups_per_step = 4, trainer.learning_rate = 2e-06, trainer.warmup_steps = 5, evaluation.problems = 64, which"
    )
    loaded, resolved, plugins = configure(env=["gsm8k"])
    assert not list(by_rule(make_plan(loaded.config, resolved, plugins)))


def test_another_trainer_keeps_its_own_defaults(tmp_path):
    loaded, _, _ = configure(model=model(tmp_path, 576), trainer="es")
    assert not loaded.config.trainer.options


def test_a_model_of_unknown_size_has_no_rules(tmp_path):
    path = model(tmp_path, 576, hidden_size=None)
    assert "rule" not in {origin for _, _, origin in configure(model=path)[0].rows()}

"""Schedules against torch's schedulers and transformers', and rates by parameter against separate optimisers."""

import tomllib

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, Trainer

from atropos_core.config.run_file import dump, to_toml
from atropos_core.errors import ConfigError
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.learning_rates import parameter_groups, schedule_factor, updates_in_all
from atropos_trainer_grpo.optimizer import Optimizer

STEPS, WARM = 40, 8
RULE = {"pattern": "q_proj", "factor": 2.0}


def of_torch(schedule, warm, floor):
    """The rates that torch's own schedulers give, at rate 1."""
    adam = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler
    after = {
        "constant": lambda: scheduler.ConstantLR(adam, factor=1.0),
        "linear": lambda: scheduler.LinearLR(adam, 1.0, floor, total_iters=STEPS - warm),
        "cosine": lambda: scheduler.CosineAnnealingLR(adam, STEPS - warm, eta_min=floor),
    }[schedule]()
    if warm:
        rising = scheduler.LinearLR(adam, 1.0 / warm, 1.0, total_iters=warm - 1)
        after = scheduler.SequentialLR(adam, [rising, after], milestones=[warm])
    rates = []
    for _ in range(STEPS):
        rates.append(adam.param_groups[0]["lr"])
        adam.step()
        after.step()
    return rates


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warm", [0, WARM])
@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_schedules_are_those_of_torch(schedule, warm, floor):
    floor = 0.0 if schedule == "constant" else floor
    options = GrpoOptions(schedule=schedule, warmup_steps=warm, schedule_floor=floor)
    assert [schedule_factor(options, update, STEPS) for update in range(STEPS)] == pytest.approx(
        of_torch(schedule, warm, floor), abs=1e-9
    )


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_after_warm_up_they_are_those_of_transformers(name):
    options = GrpoOptions(schedule=name, warmup_steps=WARM)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = transformers.get_scheduler(name, sgd, num_warmup_steps=WARM, num_training_steps=STEPS)
    for update in range(STEPS):
        if update >= WARM:  # theirs begins warm-up at a rate of 0, and so wastes an update
            assert schedule_factor(options, update, STEPS) == pytest.approx(sgd.param_groups[0]["lr"], abs=1e-9)
        sgd.step()
        theirs.step()


def test_a_schedule_stays_at_its_floor_after_its_end_and_needs_to_know_it():
    options = GrpoOptions(schedule="cosine", schedule_floor=0.2)
    assert schedule_factor(options, STEPS + 5, STEPS) == pytest.approx(0.2)
    with pytest.raises(ConfigError, match="this one has none"):
        schedule_factor(options, 0, 0)


def test_updates_are_those_of_all_epochs_and_minibatches():
    assert updates_in_all(GrpoOptions(epochs=2, minibatches=3), 7) == 42
    assert updates_in_all(GrpoOptions(warmup_steps=99), 7) == 7, "nothing falls"
    with pytest.raises(ConfigError, match="warmup_steps = 7 is all of the run's 7 optimiser steps"):
        updates_in_all(GrpoOptions(schedule="linear", warmup_steps=7), 7)


async def test_a_run_reports_the_rates_of_its_schedule(open_trainer, make_batch, gate):
    options = {"learning_rate": 0.5, "schedule": "linear", "minibatches": 2, "warmup_steps": 2}
    trainer = await open_trainer(steps=4, **options)
    rates = [(await trainer.step(make_batch(seed), gate))["learning_rate"] for seed in range(4)]
    assert rates == pytest.approx([0.5, 0.5 * 5 / 6, 0.5 * 3 / 6, 0.5 * 1 / 6])  # of the second update of each step


def test_every_rate_and_decay_is_what_a_separate_optimiser_of_torch_would_do(model_of):
    def model():
        return AutoModelForCausalLM.from_pretrained(model_of("llama", False)).requires_grad_(True)

    options = GrpoOptions(
        learning_rate=0.01, weight_decay=0.1, max_grad_norm=1e9, schedule="cosine", warmup_steps=2,
        learning_rates=[
            {"pattern": r"layers\.1\..*q_proj", "learning_rate": 0.3},
            {"pattern": "q_proj|embed_tokens", "factor": 0.5},
            {"pattern": "norm", "factor": 0.0},
        ],
    )  # fmt: skip
    ours, theirs = model(), model()
    optimizer = Optimizer(ours.named_parameters(), options, in_all=6)
    apart = {}
    for name, parameter in theirs.named_parameters():
        special = 0.3 if "layers.1." in name and "q_proj" in name else None
        rate = special or (0.005 if "q_proj" in name or "embed" in name else 0.0 if "norm" in name else 0.01)
        decay = 0.0 if parameter.ndim == 1 else 0.1
        apart[name] = torch.optim.AdamW(
            [parameter], lr=rate, betas=options.betas, eps=options.eps, weight_decay=decay, fused=True
        )
    tokens = torch.arange(2, 32)[None]
    for update in range(6):
        for each in (ours, theirs):
            each(tokens, labels=tokens).loss.backward()
        optimizer.step(optimizer.gradient_norm())
        for one in apart.values():
            one.param_groups[0]["lr"] *= schedule_factor(options, update, 6)
            one.step()
            one.param_groups[0]["lr"] /= schedule_factor(options, update, 6)
            one.zero_grad()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_what_decays_is_what_transformers_trainer_would_decay(model_of, kind):
    model = AutoModelForCausalLM.from_pretrained(model_of(kind))
    groups = parameter_groups({name: parameter.ndim for name, parameter in model.named_parameters()}, GrpoOptions())
    trained = dict(model.named_parameters())
    theirs = {name for name in Trainer.get_decay_parameter_names(None, model) if name in trained}
    assert {name for name, group in groups.items() if group.decays} == theirs


def test_moments_of_a_checkpoint_stay_with_their_parameters_when_the_groups_change():
    shapes = {"a": (3, 2), "b": (5,), "c": (4, 4)}
    weights = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    before = Optimizer(weights.items(), GrpoOptions())
    for place, parameter in enumerate(weights.values()):
        parameter.grad = torch.full_like(parameter, 0.1 * (place + 1))
    before.step(before.gradient_norm())
    options = GrpoOptions(learning_rates=[{"pattern": "c", "factor": 2.0}, {"pattern": "b", "factor": 3.0}])
    after = Optimizer(weights.items(), options)
    after.load(before.state())
    saved, now = before.state()["moments"], after.state()["moments"]
    for place, shape in enumerate(shapes.values()):
        assert now[place]["exp_avg"].shape == shape
        assert torch.equal(now[place]["exp_avg"], saved[place]["exp_avg"])


def test_a_pattern_that_is_nobodys_first_match_is_refused_with_what_there_is():
    names = {
        "model.layers.0.self_attn.q_proj.weight": 2,
        "model.layers.1.self_attn.q_proj.weight": 2,
        "lm_head.weight": 2,
    }
    with pytest.raises(ConfigError, match="'head_lm' is the first match of no parameter") as caught:
        parameter_groups(names, GrpoOptions(learning_rates=[RULE, {"pattern": "head_lm", "factor": 2.0}]))
    assert "There is: model.layers.N.self_attn.q_proj.weight, lm_head.weight." in str(caught.value)
    with pytest.raises(ConfigError, match="'q_proj' is the first match of no parameter"):
        parameter_groups(names, GrpoOptions(learning_rates=[{"pattern": "proj", "factor": 2.0}, RULE]))


async def test_such_a_pattern_is_refused_when_the_trainer_opens(open_trainer):
    with pytest.raises(ConfigError, match="'experts' is the first match of no parameter that is trained"):
        await open_trainer(learning_rates=[{"pattern": "experts", "factor": 2.0}])


async def test_under_lora_the_names_are_the_adapters(open_trainer, make_batch, gate):
    trainer = await open_trainer(
        lora={"rank": 2, "learning_rate": 0.1}, learning_rates=[{"pattern": "lora_B", "factor": 0.0}]
    )
    await trainer.step(make_batch(), gate)
    moved = {name: bool(p.abs().sum() > 0) for name, p in trainer.model.named_parameters() if "lora_B" in name}
    assert moved and not any(moved.values()), "B stays where it began, at zero"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"pattern": "a", "factor": 2.0, "learning_rate": 0.1}, "needs a factor or a learning_rate"),
        ({"pattern": "a"}, "needs a factor or a learning_rate"),
        ({"pattern": "(", "factor": 2.0}, "is not a regular expression"),
        ({"pattern": "", "factor": 2.0}, "at least 1 character"),
    ],
)
def test_rules_that_mean_nothing_are_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        GrpoOptions(learning_rates=[rule])


def test_rules_come_back_from_the_run_file_that_a_run_writes():
    options = GrpoOptions(learning_rates=[RULE, {"pattern": "norm", "learning_rate": 1e-4}])
    saved = tomllib.loads(to_toml(dump(options)))
    assert GrpoOptions.model_validate(saved) == options

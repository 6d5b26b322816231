"""The built-in components."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from atropos_core import hookimpl
from atropos_core.interfaces import Bridge, Curriculum, Engine, Reward, Sink, Trainer, Transform, Transport
from atropos_core.registry import NoOptions, Provider, ResolvedModel, RunContext

TOY_MODEL = Path(__file__).parent / "toy_model"


def _in_process(options: object) -> frozenset[Transport]:
    return frozenset({"in_process"})


@hookimpl
def atropos_rewards() -> Iterable[Provider[Reward]]:
    from atropos_core.builtin import rewards as r

    return [
        Provider("environment", "the score that the environment gave", NoOptions, lambda o, c: r.EnvironmentReward()),
        Provider(
            "exact", "1 where the reply is the answer, to the letter", r.ExactOptions, lambda o, c: r.ExactReward(o)
        ),
        Provider(
            "numeric",
            "1 where the last number of the reply is the answer's",
            r.NumericOptions,
            lambda o, c: r.NumericReward(o),
        ),
        Provider(
            "format", "the share of wanted patterns in the reply", r.FormatOptions, lambda o, c: r.FormatReward(o)
        ),
        Provider(
            "length", "0 for short rollouts, down to -1 for long ones", r.LengthOptions, lambda o, c: r.LengthReward(o)
        ),
    ]


@hookimpl
def atropos_transforms() -> Iterable[Provider[Transform]]:
    from atropos_core.builtin import transforms as t

    return [
        Provider(
            "group_advantage",
            "reward against the group's mean, by its deviation (GRPO)",
            t.GroupAdvantageOptions,
            lambda o, c: t.GroupAdvantage(o),
        ),
        Provider("drop_flat", "leave out groups whose rewards are all equal", NoOptions, lambda o, c: t.DropFlat()),
    ]


@hookimpl
def atropos_curricula() -> Iterable[Provider[Curriculum]]:
    from atropos_core.builtin import curricula as c

    return [
        Provider(
            "shuffled",
            "every task once an epoch, in an order of its own each time",
            c.OrderOptions,
            lambda o, x: c.OrderedCurriculum(x.seed, shuffled=True),
        ),
        Provider(
            "sequential",
            "every task once an epoch, in the data's order",
            c.OrderOptions,
            lambda o, x: c.OrderedCurriculum(x.seed, shuffled=False),
        ),
    ]


@hookimpl
def atropos_sinks() -> Iterable[Provider[Sink]]:
    from atropos_core.builtin import sinks as s

    return [
        Provider("console", "progress on the terminal", NoOptions, lambda o, c: s.ConsoleSink(c.steps)),
        Provider(
            "jsonl",
            "metrics.jsonl and rollouts/ in the run directory",
            s.JsonlOptions,
            lambda o, c: s.JsonlSink(o, c.directory),
        ),
    ]


@hookimpl
def atropos_bridges() -> Iterable[Provider[Bridge]]:
    def build(options: NoOptions, context: RunContext) -> Bridge:
        from atropos_core.builtin.local import LocalBridge

        return LocalBridge()

    return [Provider("local", "for an engine and a trainer in one process", NoOptions, build, _in_process)]


@hookimpl
def atropos_engines() -> Iterable[Provider[Engine]]:
    from atropos_core.builtin import toy

    return [
        Provider("toy", "a table of next-token logits, for tests", toy.ToyEngineOptions, toy.ToyEngine, _in_process)
    ]


@hookimpl
def atropos_trainers() -> Iterable[Provider[Trainer]]:
    from atropos_core.builtin import toy

    return [
        Provider("toy", "REINFORCE on the toy table, for tests", toy.ToyTrainerOptions, toy.ToyTrainer, _in_process)
    ]


@hookimpl
def atropos_resolve_model(reference: str) -> ResolvedModel | None:
    if reference != "toy":
        return None
    preset = {
        "engine": {"use": "toy"},
        "trainer": {"use": "toy"},
        "bridge": {"use": "local"},
        "sampling": {"max_tokens": 8},
    }
    return ResolvedModel(TOY_MODEL, "a table of next-token logits, for tests", preset)

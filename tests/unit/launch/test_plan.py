"""From a configuration to parts that fit: what is refused, in which words, and what is built."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from atropos_core import hookimpl
from atropos_core.builtin.config import GroupAdvantageOptions
from atropos_core.builtin.local import LocalBridge
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.builtin.toy import ToyEngine, ToyTrainer
from atropos_core.config.run_file import FLAG, Layer, load
from atropos_core.errors import ConfigError, DataError, FitError, PluginError, RemoteError, UnknownComponent
from atropos_core.interfaces import Sink
from atropos_core.launch.builder import build, build_for_evaluation, contexts
from atropos_core.launch.plan import Plan, make_plan
from atropos_core.launchers import section_of
from atropos_core.plugins.manager import Plugins, load_plugins
from atropos_core.plugins.offers import KINDS, PROVIDERS
from atropos_core.plugins.options import NoOptions, Options
from atropos_core.plugins.provider import Provider, ResolvedModel, RunContext
from atropos_core.processes.child import Child
from atropos_core.processes.proxies import HostedReward
from atropos_core.training.parts import Parts
from tests.unit.parts import SayingEngine, Words, episode

MODEL = ResolvedModel(TOY_MODEL, "toy")
TOY = {"engine.use": "toy", "trainer.use": "toy", "bridge.use": "local", "environment.words.use": "words"}


class Wiring(Options):
    carries: tuple[str, ...] = ("posix_shm",)


class Required(Options):
    key: str


class Closing(Words):
    async def close(self) -> None:
        raise OSError("cannot be closed")


class Module:
    """A plugin in memory, registered as any other is."""

    def __init__(self, **offers: list[Provider[Any]]) -> None:
        for hook, providers in offers.items():
            setattr(self, f"atropos_{hook}", self._hook(providers))

    @staticmethod
    def _hook(providers: list[Provider[Any]]) -> Any:
        def hook() -> Iterable[Provider[Any]]:
            return providers

        return hookimpl(hook)


class Entry:
    """An entry point that loads what it holds."""

    dist = None

    def __init__(self, name: str, module: Any) -> None:
        self.name, self.load = name, lambda: module


def wired(options: Any) -> frozenset[Any]:
    return frozenset(options.carries)


def carrying(*transports: Any) -> Callable[[Any], frozenset[Any]]:
    return lambda options: frozenset(transports)


Describe = Callable[[type[Provider[Any]]], Provider[Any]]
CLASSES = {hook.removeprefix("atropos_"): PROVIDERS.get(kind, Provider) for kind, hook in KINDS.items()}


def offer(name: str, transports: Any = None, *, config: Any = NoOptions, make: Any = None, **fields: Any) -> Describe:
    """Return a function that describes a component by the class of its kind."""
    transported = {"transports": transports} if transports else {}
    build = make or (lambda options, context: (options, context))
    return lambda described_by: described_by(name, "", config, build, **transported, **fields)


def installed(**offers: list[Describe]) -> Plugins:
    words = offer("words", make=lambda options, context: Words())
    offers["environments"] = [words, *offers.get("environments", [])]
    providers = {hook: [describe(CLASSES[hook]) for describe in several] for hook, several in offers.items()}
    return load_plugins([Entry("mine", Module(**providers))])  # type: ignore[list-item]


def plan(plugins: Plugins | None = None, *, training: bool = True, **values: Any) -> Plan:
    """Of the toy run with these flags; a dot is written `__`."""
    flags: dict[str, Any] = {}
    for path, value in {**TOY, **{path.replace("__", "."): value for path, value in values.items()}}.items():
        *parents, last = path.split(".")
        table = flags
        for parent in parents:
            table = table.setdefault(parent, {})
        table[last] = value
    config = load([Layer(FLAG, {key: value for key, value in flags.items() if value is not None})]).config
    return make_plan(config, MODEL, plugins or installed(), training=training)


# -- what fits


def test_the_toy_parts_fit_in_one_process():
    made = plan()
    assert made.transports == ("in_process",)
    assert set(made.single) == {"trainer", "bridge", "curriculum", "launcher"}
    assert made.engines[0].label == "engine"
    assert made.named["environment"]["words"].label == "environment.words"
    assert list(made.named["transform"]) == ["group_advantage", "drop_flat"], "in their order: it is their meaning"


ENDS = {
    "engines": [offer("shm", carrying("posix_shm", "copy")), offer("gpu", carrying("cuda_ipc", "checkpoint"))],
    "trainers": [offer("shm", carrying("posix_shm", "copy")), offer("gpu", carrying("cuda_ipc", "checkpoint"))],
    "bridges": [offer("wire", wired, config=Wiring), offer("copier", carrying("copy")), offer("saver", carrying("checkpoint")),
                offer("picky", carrying("posix_shm"), config=Required)],
}  # fmt: skip


def test_a_transport_is_one_that_all_three_have_the_cheapest_first():
    both = plan(installed(**ENDS), engine__use="shm", trainer__use="shm", bridge__use="wire",
                bridge__carries=["copy", "posix_shm"])  # fmt: skip
    assert both.transports == ("posix_shm",)
    copying = plan(
        installed(**ENDS), engine__use="shm", trainer__use="shm", bridge__use="wire", bridge__carries=["copy"]
    )
    assert copying.transports == ("copy",), "under these options, not by default"


@pytest.mark.parametrize(
    ("devices", "carries", "transport"),
    [
        ("cpu", ["posix_shm", "copy"], "posix_shm"),
        ("cuda:0", ["posix_shm", "copy"], "copy"),
    ],
)
def test_shared_memory_is_for_the_cpu_alone(devices, carries, transport):
    made = plan(installed(**ENDS), engine__use="shm", trainer__use="shm", bridge__use="wire", bridge__carries=carries,
                engine__devices=[devices], trainer__devices=[devices])  # fmt: skip
    assert made.transports == (transport,)


def test_a_broadcast_needs_a_gpu_for_each_process():
    wide = [offer("wide", carrying("broadcast", "checkpoint"), several_devices=True)]
    parts = {**ENDS, "engines": wide, "trainers": wide}
    of = {"engine__use": "wide", "trainer__use": "wide", "bridge__use": "wire", "bridge__carries": ["broadcast"]}

    def on(engine, trainer):
        return plan(installed(**parts), **of, engine__devices=engine, trainer__devices=trainer)

    for engine in (["cuda:0"], ["cuda:1", "cuda:0"]):
        with pytest.raises(
            FitError, match=r"trainer.devices = cuda:0\). Each process of a broadcast needs its own GPU"
        ) as caught:
            on(engine, ["cuda:0"])
        assert caught.value.remedy == "Use --bridge saver."
    for engine, trainer in (
        (["cuda:1"], ["cuda:0"]),
        (["cuda:0"], ["cpu"]),
        (["cpu"], ["cpu"]),
        (["cuda:1"], ["cuda:0", "cuda:1"]),
    ):
        assert on(engine, trainer).transports == ("broadcast",), "the trainer's first process sends"


def test_cuda_ipc_wants_both_ends_on_cuda():
    parts: dict[str, Any] = {
        "engine__use": "gpu",
        "trainer__use": "gpu",
        "bridge__use": "wire",
        "bridge__carries": ["cuda_ipc"],
    }
    made = plan(installed(**ENDS), **parts, engine__devices=["cuda:0"], trainer__devices=["cuda:0"])
    assert made.transports == ("cuda_ipc",)
    with pytest.raises(FitError, match=r"engine.devices = cuda:0; trainer.devices = cuda:1"):
        plan(installed(**ENDS), **parts, engine__devices=["cuda:0"], trainer__devices=["cuda:1"])
    with pytest.raises(FitError, match=r"engine.devices = cuda:0; trainer.devices = cpu") as caught:
        plan(installed(**ENDS), **parts, engine__devices=["cuda:0"], trainer__devices=["cpu"])
    assert "Use --bridge saver." in str(caught.value)


def test_weights_that_are_divided_over_devices_travel_in_files():
    devices = ["cuda:0", "cuda:1"]
    wide = offer("wide", carrying("cuda_ipc", "copy", "checkpoint"), several_devices=True)
    parts = {**ENDS, "engines": [wide], "trainers": [wide]}
    both: dict[str, Any] = {"engine__use": "wide", "trainer__use": "wide", "bridge__use": "wire",
                            "engine__devices": devices, "trainer__devices": devices}  # fmt: skip
    with pytest.raises(FitError, match=r"trainer.devices = cuda:0, cuda:1") as caught:
        plan(installed(**parts), **both, bridge__carries=["cuda_ipc", "copy"])
    assert "Use --bridge saver." in str(caught.value)
    made = plan(installed(**parts), **both, bridge__carries=["cuda_ipc", "copy", "checkpoint"])
    assert made.transports == ("checkpoint",)


def test_parts_that_do_not_fit_are_all_named_with_what_each_can_and_what_to_type():
    with pytest.raises(FitError) as caught:
        plan(installed(**ENDS), engine__use="shm", trainer__use="shm", bridge__use="saver")
    assert str(caught.value) == (
        "bridge 'saver' does not fit: it carries checkpoint; engine 'shm' takes copy, posix_shm and trainer 'shm' gives "
        "copy, posix_shm (engine.devices = cpu; trainer.devices = cpu).\n  Use --bridge copier or --bridge wire."
    )


def test_further_engines_differ_in_what_their_tables_say_and_only_the_first_shares_memory():
    mine = offer("mine", carrying("posix_shm", "copy"), config=Wiring)
    made = plan(
        installed(**{**ENDS, "engines": [mine]}), engine__use="mine", trainer__use="shm", bridge__use="wire",
        bridge__carries=["posix_shm", "copy"], engine__threads=2, engine__replica__second={"threads": 1},
        engine__replica__third={"carries": ["copy"]},
    )  # fmt: skip
    assert [engine.label for engine in made.engines] == ["engine", "engine.replica.second", "engine.replica.third"]
    assert [engine.component.threads for engine in made.engines] == [2, 1, 2]
    assert made.engines[2].options == Wiring(carries=("copy",))
    assert made.transports == ("posix_shm", "copy", "copy")


def test_a_second_engine_that_memory_cannot_be_shared_with_is_refused():
    with pytest.raises(FitError, match="Memory can be shared with the first engine only"):
        plan(installed(**ENDS), engine__use="shm", trainer__use="shm", bridge__use="wire", engine__replica__b={})


def test_a_replica_is_of_the_same_kind():
    with pytest.raises(ConfigError, match=r"engine\.replica\.b may only list what differs"):
        plan(installed(**ENDS), engine__use="shm", engine__replica__b={"use": "gpu"})


def test_several_devices_are_for_what_can_span_them():
    with pytest.raises(FitError, match=r"engine 'shm' runs on one"):
        plan(
            installed(**ENDS),
            engine__use="shm",
            trainer__use="shm",
            bridge__use="wire",
            engine__devices=["cuda:0", "cuda:1"],
        )


def test_several_machines_are_for_a_trainer_that_can_span_them_and_a_launcher_that_has_them():
    chosen: dict[str, Any] = {"engine__use": "shm", "bridge__use": "wire", "trainer__machines": 2}
    with pytest.raises(FitError, match=r"trainer\.machines = 2, and trainer 'shm' runs on one machine"):
        plan(installed(**ENDS), **chosen, trainer__use="shm")
    wide = offer("wide", carrying("copy"), several_machines=True, runs_in="process")
    with pytest.raises(FitError, match=r"trainer\.machines = 2, but launcher 'local' has only this machine") as caught:
        plan(installed(**{**ENDS, "trainers": [wide]}), **chosen, trainer__use="wide")
    assert "--launcher ray" in str(caught.value)


async def test_components_get_the_facts_of_trainer_and_bridge(tmp_path):
    seen = []

    def make(options, context):
        seen.append(context.announced)
        return SayingEngine()

    announced = offer("mine", carrying("in_process"), make=make)
    bridge = offer(
        "announcing", carrying("in_process"), make=lambda o, c: LocalBridge(), announces=lambda _: {"port": 7}
    )
    made = plan(installed(engines=[announced], bridges=[bridge]), engine__use="mine", bridge__use="announcing")
    parts = await build(made, prepared(tmp_path))
    await parts.close()
    assert seen == [{"port": 7, "advantages": GroupAdvantageOptions().announced(), "flat_groups": "left out"}], (
        "the default transform's as well"
    )


def test_components_wait_for_servers_elsewhere_as_long_as_the_run_file_says(tmp_path):
    teacher = {"big": {"use": "distillation", "url": "http://127.0.0.1:9/v1", "tokenizer": "tiny-teacher"}}
    run = {
        "environment": {"gsm8k": {"use": "gsm8k"}}, "bridge": {"use": "checkpoint"}, "teacher": teacher,
        "engine": {"use": "remote", "url": "http://127.0.0.1:9"}, "watch": {"least_s": 7.0},
        "trainer": {"use": "grpo", "distillation": {"kind": "forward"}},
    }  # fmt: skip
    plugins = load_plugins()
    config = load([Layer(FLAG, run)]).config
    made = contexts(make_plan(config, plugins.resolve_model("tiny"), plugins), tmp_path)
    assert {chosen.label for chosen, _ in made} >= {"engine", "trainer", "bridge", "teacher.big"}
    assert all(RunContext.from_record(context.record()) == context for _, context in made), "in other processes too"
    for chosen, context in made:
        assert context.patience.least_s == 7.0
        if chosen.label in ("engine", "teacher.big"):
            assert least_s_of(chosen.build(context)) == 7.0


def test_a_teachers_process_is_a_role_of_the_run_and_has_its_launcher(tmp_path):
    large = {"use": "distillation", "model": "tiny-teacher", "engine": {"use": "hf", "devices": ["cpu"]}}
    elsewhere = {"use": "distillation", "url": "http://127.0.0.1:9/v1", "tokenizer": "tiny-teacher"}
    run = {
        "environment": {"gsm8k": {"use": "gsm8k"}}, "bridge": {"use": "checkpoint"}, "teacher": {"large": large, "other": elsewhere},
        "engine": {"use": "hf", "devices": ["cpu"], "replica": {"second": {}}},
        "trainer": {"use": "grpo", "devices": ["cpu"], "distillation": {"kind": "forward"}},
    }  # fmt: skip
    plugins = load_plugins()
    made = make_plan(load([Layer(FLAG, run)]).config, plugins.resolve_model("tiny"), plugins)
    roles = made.roles()
    assert roles == dict.fromkeys(["engine", "engine-second", "trainer", "teacher-large"], ("cpu",))
    assert made.for_launcher(tmp_path).roles == roles
    assert [section_of(role) for role in roles] == [
        "engine",
        "engine.replica.second",
        "trainer",
        "teacher.large.engine",
    ]
    assert all(context.launcher is not None for _, context in contexts(made, tmp_path))


def least_s_of(component: Any) -> float:
    """What waits for the server inside: an `Api` or a `ServerWatch`."""
    if hasattr(component, "_api"):
        return float(component._api.patience.least_s)
    return float(component._source._client._watched.__self__._patience.least_s)


def test_a_bridge_whose_options_are_wrong_is_not_the_one_that_is_advised():
    with pytest.raises(FitError, match="Use --bridge wire"):
        wire, _copier, saver, picky = ENDS["bridges"]
        plan(
            installed(**{**ENDS, "bridges": [wire, saver, picky]}),
            engine__use="shm",
            trainer__use="shm",
            bridge__use="saver",
        )


@pytest.mark.parametrize(
    ("bridges", "advice"),
    [(ENDS["bridges"], "use --engine gpu --bridge saver."), (ENDS["bridges"][:2], "choose another engine or trainer.")],
)
def test_ends_that_no_bridge_joins_are_refused_with_the_engines_that_one_joins(bridges, advice):
    with pytest.raises(FitError) as caught:
        plan(installed(**{**ENDS, "bridges": bridges}), engine__use="shm", trainer__use="gpu", bridge__use="wire")
    assert f"No installed bridge joins engine 'shm' and trainer 'gpu': {advice}" in str(caught.value)


def test_a_bridge_that_carries_nothing_says_nothing():
    with pytest.raises(FitError, match="it carries nothing; engine 'toy' takes in_process"):
        plan(installed(bridges=[offer("lame")]), bridge__use="lame")


# -- what is refused before


def test_a_plan_without_an_environment_is_refused_with_the_flag_to_type():
    with pytest.raises(ConfigError, match="no environment to train on") as caught:
        config = load([Layer(FLAG, {"engine": {"use": "toy"}})]).config
        make_plan(config, MODEL, installed())
    assert "--env gsm8k" in str(caught.value)


def test_a_wrong_option_is_named_by_its_path_with_the_near_miss():
    with pytest.raises(ConfigError, match=r"unknown key 'trainer.learning_rat'. Did you mean 'learning_rate'\?"):
        plan(trainer__learning_rat=1.0)
    with pytest.raises(
        ConfigError, match=r"reward.length.limit_tokens: input should be greater than or equal to 1, not 0"
    ):
        plan(reward__length__limit_tokens=0)
    with pytest.raises(ConfigError, match=r"'bridge.key' is missing"):
        plan(installed(**ENDS), bridge__use="picky")


def test_an_unknown_component_is_refused_with_the_near_miss():
    with pytest.raises(UnknownComponent, match=r"no transform named 'drop_flt'. Did you mean 'drop_flat'\?"):
        plan(transform__drop_flt__use="drop_flt")


def test_a_component_that_needs_what_is_not_there_is_refused_before_it_is_built():
    needy = offer("needy", carrying("in_process"), requires=frozenset({"a_module_that_nobody_has"}))
    with pytest.raises(FitError, match="needs the module 'a_module_that_nobody_has'") as caught:
        plan(installed(engines=[needy]), engine__use="needy")
    assert "pip install a_module_that_nobody_has" in str(caught.value)


def test_an_evaluation_needs_no_bridge_that_fits_and_no_sink():
    made = plan(
        installed(**ENDS), training=False, bridge__use="nonsense", trainer__use="nonsense", sink__x__use="nonsense"
    )
    assert made.transports == ()
    assert not made.single
    assert [engine.label for engine in made.engines] == ["engine"]
    assert set(made.named) == {"environment", "reward"}


def test_a_resolved_plan_shows_every_option_of_every_component():
    resolved = plan(trainer__learning_rate=3.0).resolved()
    assert resolved["trainer"]["use"] == "toy"
    assert resolved["trainer"]["learning_rate"] == 3.0
    assert resolved["engine"]["latency_s"] == 0.0, "defaults too"
    assert resolved["transform"]["group_advantage"] == {"use": "group_advantage", "baseline": "group"}
    again = make_plan(load([Layer("file", resolved)]).config, MODEL, installed())
    assert again.resolved() == resolved, "what is saved beside a run means the same run"


# -- building


def prepared(folder: Path) -> Path:
    for name in ("logs", "rollouts"):
        (folder / name).mkdir()
    return folder


def hosted() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "atropos_core.processes.child_main" in child.cmdline()
    ]


def test_a_run_keeps_the_date_on_which_it_began():
    first = plan(installed())
    assert first.today == str(first.config.date) == first.resolved()["date"] and len(first.today) == 10
    resumed = plan(installed(), date="2024-02-29")
    assert resumed.today == "2024-02-29"
    assert resumed.tokenizer()._today == "2024-02-29", "which test_chat_template.py renders"


async def test_parts_are_built_with_their_options_and_the_runs_context(tmp_path):
    seen: list[tuple[Any, RunContext]] = []

    def make(options: Any, context: RunContext) -> SayingEngine:
        seen.append((options, context))
        return SayingEngine()

    mine = offer("mine", carrying("in_process"), config=Wiring, make=make)
    made = plan(installed(engines=[mine]), engine__use="mine", engine__carries=["copy"], engine__threads=2, seed=9)
    parts = await build(made, prepared(tmp_path))
    [(options, context)] = seen
    assert options == Wiring(carries=("copy",))
    assert context == RunContext(
        tmp_path,
        TOY_MODEL,
        label="engine",
        steps=100,
        seed=9,
        transport="in_process",
        transports=("in_process",),
        is_trained=True,
        announced={
            "advantages": GroupAdvantageOptions().announced(),
            "flat_groups": "left out",
        },  # by the default transforms
        threads=2,
        today=made.today,
    )
    assert isinstance(parts.trainer.behind, ToyTrainer)
    assert isinstance(parts.bridge, LocalBridge)
    assert [type(part).__name__ for part in parts.transforms.values()] == ["GroupAdvantage", "DropFlat"]
    assert [(of.name, of.weight) for of in parts.rewards] == [("environment", 1.0)]
    assert set(parts.stateful()) == {"curriculum", "sink.jsonl"}
    assert await parts.close() == []


async def test_a_reward_runs_in_a_process_where_the_run_file_says_so(tmp_path):
    parts = await build(plan(reward__exact__runs_in="process", reward__exact__weight=0.5), prepared(tmp_path))
    exact = next(of for of in parts.rewards if of.name == "exact")
    assert isinstance(exact.reward, HostedReward)
    assert exact.weight == 0.5
    [child] = hosted()
    assert child.cmdline()[-1] == "reward-exact"
    task = Words().tasks("train")[3]
    assert (await exact.reward(task, [episode(0.0, "3"), episode(0.0, "4")])).tolist() == [1.0, 0.0]
    assert await parts.close() == []
    assert hosted() == []


async def test_a_component_that_raises_while_it_is_built_is_named_and_nothing_stays(tmp_path):
    def broken(options: Any, context: RunContext) -> Any:
        raise ZeroDivisionError("inside")

    plugins = installed(bridges=[offer("broken", carrying("in_process"), make=broken)])
    made = plan(plugins, bridge__use="broken", reward__exact__runs_in="process")
    with pytest.raises(PluginError, match=r"bridge: 'broken' of .* could not be built: ZeroDivisionError: inside"):
        await build(made, prepared(tmp_path))
    assert hosted() == []


async def test_a_child_that_cannot_build_its_component_ends_the_others(tmp_path):
    made = plan(reward__format__runs_in="process", reward__format__patterns=["("], reward__exact__runs_in="process")
    with pytest.raises(RemoteError, match=r"reward-format raised"):
        await build(made, prepared(tmp_path))
    assert hosted() == []


class NoData(Words):
    """An environment whose data are not there. What it had started is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False

    async def open(self) -> None:
        raise DataError("rows.jsonl, line 3 has no column 'prompt'.")

    async def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("building", [build, build_for_evaluation])
async def test_data_that_are_missing_end_a_run_whose_processes_are_still_being_started(tmp_path, building, monkeypatch):
    started = []

    async def endless(*arguments: Any, **options: Any) -> Child:
        started.append(arguments)
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(Child, "start", endless)
    environment = NoData()
    offered = offer("missing", make=lambda options, context: environment)
    hosted_engine = offer("hosted", carrying("in_process"), runs_in="process")
    plugins = installed(environments=[offered], engines=[hosted_engine])
    made = plan(plugins, engine__use="hosted", environment__words__use="missing", training=building is build)
    with pytest.raises(DataError, match="line 3 has no column"):
        await asyncio.wait_for(building(made, prepared(tmp_path)), 10)
    assert started and environment.is_closed


async def test_a_build_that_is_a_coroutine_is_refused(tmp_path):
    async def waits() -> None: ...

    coroutine = waits()
    made = plan(
        installed(bridges=[offer("slow", carrying("in_process"), make=lambda o, c: coroutine)]), bridge__use="slow"
    )
    with pytest.raises(PluginError, match="build of 'slow' must not be a coroutine"):
        await build(made, prepared(tmp_path))
    coroutine.close()


# -- closing


class Recording(Sink):
    def __init__(self, closed: list[str]) -> None:
        self.closed = closed

    async def step(self, step: int, metrics: Any, groups: Any) -> None: ...

    async def close(self) -> None:
        self.closed.append("sink")
        raise KeyError("cannot be closed either")


async def test_every_part_is_closed_whatever_the_others_raise(tmp_path):
    parts: Parts = await build(plan(reward__exact__runs_in="process"), prepared(tmp_path))
    closed: list[str] = []
    parts.sinks["mine"] = Recording(closed)
    parts.environments["mine"] = Closing()
    errors = await parts.close()
    assert sorted(type(error).__name__ for error in errors) == ["KeyError", "OSError"]
    assert closed == ["sink"]
    assert hosted() == [], "the processes are ended all the same"


async def test_an_evaluation_closes_its_processes_though_an_environment_cannot_be_closed(tmp_path):
    parts = await build_for_evaluation(plan(training=False, reward__exact__runs_in="process"), prepared(tmp_path))
    assert isinstance(parts.engine, ToyEngine)
    assert len(hosted()) == 1
    parts.environments["mine"] = Closing()
    with pytest.raises(OSError, match="cannot be closed"):
        await parts.close()
    assert hosted() == []


def test_two_transforms_that_make_advantages_are_refused_with_the_one_to_leave_out():
    with pytest.raises(ConfigError, match=r"transform.group_advantage has no effect: .* transform.mine") as refused:
        plan(transform__mine__use="group_advantage", transform__mine__baseline="others")
    assert "transform.group_advantage.use=none" in str(refused.value)
    made = plan(transform__mine__use="group_advantage", transform__group_advantage__use="none")
    assert list(made.named["transform"]) == ["mine", "drop_flat"]
    twice = plan(transform__mine__use="drop_flat").named["transform"]
    assert list(twice) == ["mine", "group_advantage", "drop_flat"], "rewards may change between the two"


@pytest.mark.parametrize(
    ("sinks", "said", "remedy"),
    [
        ({"b__use": "jsonl"}, "[sink.b] and [sink.jsonl] would both write metrics.jsonl", "Leave one out: --set sink.b.use=none."),
        ({"a__use": "csv", "b__use": "csv"}, "[sink.a] and [sink.b] would both write metrics.csv", "Set sink.b.file to another name"),
        ({"a__use": "csv", "a__file": "metrics.jsonl"}, "[sink.a] and [sink.jsonl] would both", "Set sink.a.file to another name"),
        ({"a__use": "csv", "a__file": "t", "b__use": "csv", "b__file": "t"}, "[sink.a] and [sink.b] would both write t,", "sink.b.file"),
        (
            {"a__use": "tensorboard", "b__use": "tensorboard", "b__directory": "./tensorboard/"},
            "[sink.a] and [sink.b] would both write tensorboard,", "Set sink.b.directory to another name",
        ),
        ({"a__use": "trackio", "b__use": "trackio"}, "both write the run with the name of its directory", "Set sink.b.name"),
    ],
)  # fmt: skip
def test_two_sinks_that_would_write_one_file_are_refused(sinks: dict[str, str], said: str, remedy: str):
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        plan(
            load_plugins(), environment__words__use="gsm8k", **{f"sink__{name}": value for name, value in sinks.items()}
        )
    assert remedy in refused.value.remedy


def test_sinks_that_write_files_of_their_own_are_not_refused():
    others = {"a__use": "csv", "b__use": "csv", "b__file": "b.csv", "c__use": "tensorboard", "d__use": "console"}
    made = plan(
        load_plugins(), environment__words__use="gsm8k", **{f"sink__{name}": value for name, value in others.items()}
    )
    assert set(made.named["sink"]) >= {"a", "b", "c", "d", "jsonl"}

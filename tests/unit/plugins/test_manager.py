"""Plugins that fail, each by name and alone. They are installed as pip would: a package and its metadata on the path."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atropos_core.cli.options import short_name
from atropos_core.config.run_file import Layer, dump, load, to_toml
from atropos_core.errors import AtroposError, ConfigError, PluginError, UnknownComponent
from atropos_core.launch.plan import make_plan
from atropos_core.plugins.manager import BROUGHT_BY, PluginReport, Plugins, load_plugins
from atropos_core.plugins.registry import kind_named

GOOD = """
from atropos_core import hookimpl
from atropos_core.plugins.options import NoOptions
from atropos_core.plugins.provider import Provider

class Reward:
    async def __call__(self, task, episodes):
        return [0.0] * len(episodes)

@hookimpl
def atropos_rewards():
    yield Provider("{name}", "nothing", NoOptions, lambda options, context: Reward(){more})
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def put(plugin: str, source: str, distribution: str | None = None, module: str | None = None) -> None:
        distribution = distribution or f"atropos-plugin-{plugin.replace('_', '-')}"
        module = module or f"atropos_{plugin}"
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{distribution.replace('-', '_')}-1.2.3.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2.3\n")
        (info / "entry_points.txt").write_text(f"[atropos]\n{plugin} = {module}\n")

    yield put
    for name in set(sys.modules) - before:
        if name.startswith("atropos_") and not name.startswith("atropos_core"):
            del sys.modules[name]


def good(name: str, more: str = "") -> str:
    return GOOD.format(name=name, more=more)


def report(plugins: Plugins, name: str) -> PluginReport:
    [found] = [report for report in plugins.reports if report.name == name]
    return found


def plan_with_reward(plugins: Plugins, reward: str) -> None:
    values = {
        "model": "toy", "engine": {"use": "toy"}, "trainer": {"use": "toy"}, "bridge": {"use": "local"},
        "environment": {"none": {"use": "atropos_testing.samples:TwoSums"}}, "reward": {reward: {}},
    }  # fmt: skip
    make_plan(load([Layer("test", values)]).config, plugins.resolve_model("toy"), plugins)


def test_a_plugin_that_is_whole_is_found_by_name(install: Install) -> None:
    install("reward_zero", good("zero"))
    plugins = load_plugins()
    found = plugins.registry.find("reward", "zero")
    assert (found.plugin, found.distribution) == ("reward_zero", "atropos-plugin-reward-zero")
    assert report(plugins, "reward_zero").version == "1.2.3"
    plan_with_reward(plugins, "zero")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise RuntimeError('no licence')", "no licence"),
        ("import atropos_no_such_module", "No module named 'atropos_no_such_module'"),
        ("def broken(:", "invalid syntax"),
        ("import sys; sys.modules[__name__] = None; raise ImportError('half loaded')", "half loaded"),
        (good("zero").replace("atropos_rewards", "atropos_reward"), "unknown hook 'atropos_reward'"),
        (good("zero").replace("atropos_rewards()", "atropos_rewards(extra)"), "extra"),
        (good("zero").replace("yield Provider", "return Provider"), "must return a list of Providers"),
        (good("zero").replace("yield Provider", "yield 3, Provider"), "is not a Provider"),
        (good("zero").replace("atropos_rewards", "atropos_engines"), "is described by a Provider"),
        (good("zero").replace("    yield Provider", "    1 / 0\n    yield Provider"), "division by zero"),
        (good("zero").replace("lambda options, context: Reward()", "build") + "\nasync def build(o, c): ...", "ordinary function"),
    ],
    ids=lambda one: one[:30].strip().replace("\n", " "),
)  # fmt: skip
def test_a_broken_plugin_is_named_and_the_rest_works(install: Install, source: str, error: str) -> None:
    install("reward_broken", source)
    install("reward_zero", good("nil"))
    plugins = load_plugins()
    assert error in str(report(plugins, "reward_broken").error)
    assert [one.name for one in plugins.broken()] == ["reward_broken"]
    plan_with_reward(plugins, "nil")
    with pytest.raises(UnknownComponent):
        plugins.registry.find("reward", "zero")  # nothing of a broken plugin is offered
    with pytest.raises(PluginError, match="plugin 'reward_broken'.*does not load") as raised:
        plugins.registry.find("reward", "broken")
    assert raised.value.__cause__ is report(plugins, "reward_broken").error


def test_a_plugin_that_ends_the_program_at_import_is_only_a_broken_plugin(install: Install) -> None:
    install("reward_exits", "raise SystemExit('bye')")
    plugins = load_plugins()
    assert "bye" in str(report(plugins, "reward_exits").error)


def test_one_name_from_two_distributions_is_refused_by_both_names(install: Install) -> None:
    install("reward_zero", good("zero"))
    install("reward_nought", good("zero"))
    plugins = load_plugins()
    assert not plugins.broken()
    assert [len(offers) for offers in plugins.registry.contested()] == [2]
    with pytest.raises(PluginError, match="atropos-plugin-reward-nought and atropos-plugin-reward-zero"):
        plan_with_reward(plugins, "zero")
    plan_with_reward(plugins, "numeric")


def test_a_blocked_plugin_settles_it(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("reward_zero", good("zero"))
    install("reward_nought", good("zero"))
    monkeypatch.setenv("ATROPOS_DISABLE_PLUGINS", "reward_nought, other")
    plugins = load_plugins()
    assert plugins.registry.find("reward", "zero").plugin == "reward_zero"
    assert report(plugins, "reward_nought").blocked


def test_a_blocked_plugin_is_not_even_imported(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("reward_bomb", "raise RuntimeError('imported')")
    monkeypatch.setenv("ATROPOS_DISABLE_PLUGINS", "reward_bomb")
    assert not load_plugins().broken()


def test_one_entry_point_name_from_two_distributions_loads_both(install: Install) -> None:
    install("reward_zero", good("zero"))
    install("reward_zero", good("nil"), distribution="somebody-elses", module="atropos_else")
    plugins = load_plugins()
    assert not plugins.broken()
    assert plugins.registry.find("reward", "zero").distribution == "atropos-plugin-reward-zero"
    assert plugins.registry.find("reward", "nil").distribution == "somebody-elses"


def test_an_offer_for_another_core_is_refused_by_name_and_only_when_requested(install: Install) -> None:
    install("reward_old", good("old", ', core_api=">=7"'))
    install("reward_zero", good("zero"))
    plugins = load_plugins()
    assert [error for _, error in report(plugins, "reward_old").refused]
    plan_with_reward(plugins, "zero")
    with pytest.raises(PluginError, match=r"reward 'old' of atropos-plugin-reward-old needs atropos-core >=7"):
        plan_with_reward(plugins, "old")


def test_a_core_api_that_is_no_range_is_refused(install: Install) -> None:
    install("reward_odd", good("odd", ', core_api="newest"'))
    with pytest.raises(PluginError, match="which is not a version range"):
        load_plugins().registry.find("reward", "odd")


def test_something_missing_on_this_machine_is_named_with_how_to_get_it(install: Install) -> None:
    install("reward_heavy", good("heavy", ', requires=frozenset({"atropos_no_such_module"})'))
    with pytest.raises(AtroposError, match=r"(?s)needs the module 'atropos_no_such_module'.*pip install"):
        plan_with_reward(load_plugins(), "heavy")


def test_a_build_that_fails_is_named_with_its_own_error(install: Install, tmp_path: Path, atropos, sevens: str) -> None:  # type: ignore[no-untyped-def]
    install("reward_fails", good("fails").replace("lambda options, context: Reward()", "lambda o, c: 1 / 0"))
    ended = atropos(
        "run", "--model", "toy", "--env", sevens, "--reward", "fails", "--steps", "1", PYTHONPATH=str(tmp_path)
    )
    assert ended.code == 2 and "Traceback" not in ended.err
    assert "reward.fails: 'fails' of atropos-plugin-reward-fails could not be built: ZeroDivisionError" in ended.err


def test_a_run_that_does_not_name_a_broken_plugin_goes_on_with_one_warning(
    install: Install,
    tmp_path: Path,
    atropos,
    sevens: str,  # type: ignore[no-untyped-def]
) -> None:
    install("reward_broken", "raise RuntimeError('no licence')")
    ended = atropos("run", "--model", "toy", "--env", sevens, "--steps", "1", PYTHONPATH=str(tmp_path))
    assert ended.code == 0, ended.err
    assert ended.err.count("reward_broken") == 1
    listed = atropos("plugins", PYTHONPATH=str(tmp_path))
    assert listed.code == 0 and "broken" in listed.out and "RuntimeError: no licence" in listed.out


SOME = {  # of options that cannot all be left out, and of forms that are not the default's
    "ensemble": [{"members": {"environment": {}, "format": {"patterns": ["7"]}}}],
    "judge": [{"url": "http://127.0.0.1:1/v1", "model": "m"}],
    "length_penalty": [{}, {"form": "token", "cost": 0.1}],
    "distillation": [{"model": "tiny"}, {"url": "http://127.0.0.1:1/v1", "tokenizer": "tiny"}],
    "format": [{"patterns": ["7"]}],
    "remote": [{"url": "http://127.0.0.1:1"}],
    "dataset": [
        {"tasks": "train.jsonl"},
        {"tasks": "/a.csv", "test_tasks": "/b.csv", "score": "exact", "pattern": "A: (.*)"},
        {"hub": "a/b", "subset": "main", "test_split": "test", "score": "./grade.py:score", "answer": ""},
    ],
    "atroposlib": [{"file": "/files/env.py:Words", "config": {"letter": "b"}, "datasets": {"a/b": "c"}}],
    "gem": [{"id": "game:Sudoku-v0-easy"}, {"id": "x", "action": "pattern", "pattern": "a", "parameters": {"rows": 3}}],
    "openenv": [{"url": "http://127.0.0.1:1", "field": "message"}, {"url": "ws://127.0.0.1:1", "tools": True}],
    "verifiers": [{"id": "example/sums"}, {"id": "x", "datasets": {"a/b": "b.jsonl"}, "held_out": 0.2}],
    "textarena": [{"game": "TicTacToe-v0"}, {"game": "x", "players": 1, "parameters": {"rows": 3}}],
    "reasoning_gym": [
        {"dataset": "gcd"},
        {"mixture": {"gcd": 1.0, "lcm": 2.0}, "parameters": {"gcd": {"max_value": 9}}},
    ],
    "prompted": [{"environment": "gsm8k"}, {"environment": {"use": "gsm8k", "problems": 3}, "place": "system"}],
    "gepa": [{"url": "http://127.0.0.1:1/v1"}, {"proposer": "first_words"}],
    "docker": [{"image": "debian"}],
    "agent": [
        {"command": ["python", "agent.py"], "tasks_from": "gsm8k"},
        {
            "function": "agent:main",
            "tasks": "tasks.jsonl",
            "reward": {"function": "grade:grade"},
            "env": {"A": "{task.id}"},
            "files": {"a.txt": {"text": "{task.prompt}"}},
        },
    ],
}


def every_options() -> list[Any]:
    offers = load_plugins().registry.offers()
    return [
        pytest.param(offer.provider.options, some, id=f"{offer.kind}-{offer.provider.name}-{at}")
        for offer in offers
        for at, some in enumerate(SOME.get(offer.provider.name, [{}]))
    ]


@pytest.mark.parametrize(("options", "some"), every_options())
def test_options_are_what_they_were_once_a_run_is_resumed(options: Any, some: dict[str, Any]) -> None:
    """From its config.toml, which names them all."""
    chosen = options.model_validate(some)
    assert options.model_validate(tomllib.loads(to_toml(dump(chosen)))) == chosen


def test_a_near_miss_is_suggested_and_kinds_are_kept_apart() -> None:
    registry = load_plugins([]).registry
    with pytest.raises(UnknownComponent, match="there is no reward named 'numerc'. Did you mean 'numeric'"):
        registry.find("reward", "numerc")
    with pytest.raises(UnknownComponent, match="Did you mean 'gsm8k'"):
        load_plugins().registry.find("environment", "GSM8K")
    misspelled = "no component or module is named 'datset'. Did you mean 'dataset:units.jsonl'?"
    with pytest.raises(UnknownComponent, match=re.escape(misspelled)):
        load_plugins().registry.find("environment", "datset:units.jsonl")
    with pytest.raises(UnknownComponent, match=re.escape(misspelled)):
        kind_named("datset:units.jsonl", load_plugins().registry, ("environment", "reward"))
    with pytest.raises(UnknownComponent, match="Choose one of: local"):
        registry.find("bridge", "zzz")


TAKING = """
from atropos_core import Options, hookimpl
from atropos_core.plugins.provider import Provider

class Words(Options):
    word: str
    times: int = 1

class Reward:
    async def __call__(self, task, episodes):
        return [0.0] * len(episodes)

@hookimpl
def atropos_rewards():
    yield Provider("says", "nothing", Words, lambda options, context: Reward(), argument="word")
"""


def test_what_follows_a_colon_is_the_option_that_the_component_takes_there(install: Install) -> None:
    install("reward_says", TAKING)
    registry = load_plugins().registry
    config = registry.find("reward", "says:./a.py:B").provider.options
    assert dump(config.model_validate({"times": 2})) == {"word": "./a.py:B", "times": 2}
    assert dump(config.model_validate({"word": "other"}))["word"] == "other", "what a run file says of it stands"
    with pytest.raises(ConfigError, match="'says:' has nothing after its colon"):
        registry.find("reward", "says:")
    with pytest.raises(ConfigError, match="no module named 'numeric'"):
        registry.find("reward", "numeric:word")  # which takes none: it is a place, as any other
    assert short_name("says:./folder/a.py") == "a"
    assert short_name("says:owner/Word") == "word"
    assert short_name("says:./folder/2024 train.v2.jsonl") == "2024_train_v2", (
        "or --set environment.NAME.x could not name it"
    )


def test_a_file_of_rows_is_named_after_what_reads_it() -> None:
    with pytest.raises(
        UnknownComponent, match=r"A file of rows is named after what reads it: dataset:\./rows\.jsonl\."
    ):
        load_plugins().registry.find("environment", "./rows.jsonl")


SERVER = """
from atropos_core import hookimpl

async def serve(engine, where, token_file, info=None): ...

@hookimpl
def atropos_engine_servers():
    return [serve]
"""


def plan_with_workers(plugins: Plugins) -> Any:
    values = {
        "model": "toy", "engine": {"use": "toy"}, "trainer": {"use": "toy"}, "bridge": {"use": "local"},
        "environment": {"none": {"use": "atropos_testing.samples:TwoSums"}}, "api": {"url": "http://127.0.0.1:1"},
    }  # fmt: skip
    return make_plan(load([Layer("test", values)]).config, plugins.resolve_model("toy"), plugins)


def test_the_server_of_a_runs_engines_is_what_a_plugin_offers(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATROPOS_DISABLE_PLUGINS", "trajectory_api")
    with pytest.raises(
        ConfigError, match="no installed plugin offers it.*\n.*pip install atropos-plugin-trajectory-api"
    ):
        plan_with_workers(load_plugins())
    install("my_server", SERVER)
    with pytest.raises(ConfigError, match="needs a client of its trajectory API.*\n.*atropos-plugin-trajectory-api"):
        plan_with_workers(load_plugins())
    install("my_source", SERVER.replace("engine_servers", "sources"))
    made = plan_with_workers(load_plugins())
    assert (made.serve_engine.__module__, made.open_source.__module__) == ("atropos_my_server", "atropos_my_source")
    install("other_server", SERVER)
    with pytest.raises(PluginError, match="two plugins offer the server.*my_server and .*other_server"):
        plan_with_workers(load_plugins())


def test_the_server_of_policies_is_what_a_plugin_offers(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_plugins().policy_server().__module__ == "atropos_agent_api.plugin"
    monkeypatch.setenv("ATROPOS_DISABLE_PLUGINS", "agent_api")
    with pytest.raises(ConfigError, match="no installed plugin offers it.*\n.*pip install atropos-plugin-agent-api"):
        load_plugins().policy_server()
    install("my_server", SERVER.replace("engine_servers", "policy_servers"))
    assert load_plugins().policy_server().__module__ == "atropos_my_server"
    monkeypatch.delenv("ATROPOS_DISABLE_PLUGINS")
    with pytest.raises(PluginError, match="two plugins offer the server of policies: .*agent_api and .*my_server"):
        load_plugins().policy_server()


FUNCTIONS = """
from atropos_core import hookimpl

@hookimpl
def atropos_functions():
    return {"view": print}
"""


def test_a_function_is_what_a_plugin_offers(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_plugins().function("view").__module__ == "atropos_viewer.python_functions"
    monkeypatch.setenv("ATROPOS_DISABLE_PLUGINS", "viewer")
    with pytest.raises(ConfigError, match="atropos_core.view is a function of .*\n.*pip install atropos-plugin-viewer"):
        load_plugins().function("view")
    install("my_page", FUNCTIONS)
    assert load_plugins().function("view") is print
    monkeypatch.delenv("ATROPOS_DISABLE_PLUGINS")
    with pytest.raises(PluginError, match="two plugins offer the function 'view': .*my_page and .*viewer"):
        load_plugins().function("view")


def test_what_to_install_for_a_function_is_the_distribution_that_offers_it() -> None:
    plugins = load_plugins()
    distributions = {f"{one.distribution}:{one.name}": one.distribution for one in plugins.reports}
    offered = {
        name: distributions[one.plugin_name]
        for one in plugins.manager.hook.atropos_functions.get_hookimpls()
        for name in one.function()
    }
    assert offered and offered.items() <= BROUGHT_BY.items()


def test_a_run_that_runs_its_own_environments_needs_no_such_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_DISABLE_PLUGINS", "trajectory_api")
    plan_with_reward(load_plugins(), "numeric")


ENDS = """
def __getattr__(name):
    if name == 'ends':
        raise SystemExit(3)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
"""


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("atropos_p.config:Missing", "No module named 'atropos_p.config'"),
        ("atropos_p:Missing", "module 'atropos_p' has no attribute 'Missing'"),
        ("atropos_p", "has no attribute ''"),
        ("", "Empty module name"),
        ("atropos_p:ends", "which is how a process is ended"),
        ("atropos_p:Reward", "not a class of Options"),
    ],
)
def test_options_that_are_not_where_a_provider_says_are_named_where_they_are_needed(
    install: Install, config: str, why: str
) -> None:
    source = good("p").replace("NoOptions, lambda", f"{config!r}, lambda")
    install("p", source + ENDS)
    plugins = load_plugins()
    assert report(plugins, "p").error is None  # a listing does not look
    with pytest.raises(PluginError, match=f"the options of 'p', {config}, (could not be imported: .*|are .*){why}"):
        _ = plugins.registry.find("reward", "p").provider.options


RESOLVER = """
from atropos_core import hookimpl
from atropos_core.errors import ConfigError

@hookimpl
def atropos_resolve_model(reference):
    if reference != "toy":
        raise {error}
"""


def test_a_resolver_that_refuses_a_name_is_heard_and_one_that_fails_is_passed_over(install: Install) -> None:
    install("model_strict", RESOLVER.format(error="ConfigError('strict is closed today')"))
    with pytest.raises(ConfigError, match="strict is closed today"):
        load_plugins().resolve_model("strict")
    install("model_broken", RESOLVER.format(error="RuntimeError('no licence')").replace("!=", "=="))
    assert load_plugins().resolve_model("toy").directory.is_dir()

"""Code of a user's own, named by its file."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from atropos_core.config.component import Component
from atropos_core.config.resolve import resolve_component
from atropos_core.config.run_file import read_file
from atropos_core.errors import ConfigError, PluginError
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.offers import KINDS
from atropos_core.plugins.options import NoOptions
from atropos_core.plugins.provider import RunContext
from atropos_core.plugins.references import load_reference, place_of


def test_a_file_that_could_not_be_imported_is_read_anew_and_never_half_made(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("half = 1\nraise RuntimeError('not yet')\n")
    for _ in range(2):
        with pytest.raises(PluginError, match="could not be imported: RuntimeError: not yet"):
            load_reference(f"{file}:half")
    file.write_text("half = 2  # and this time all of it\nwhole = half\n")
    assert load_reference(f"{file}:whole") == 2
    assert load_reference(f"{file}:half") == 2


def test_a_file_imports_what_is_beside_it_but_never_what_is_beside_another(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for folder, value in (("one", 1), ("two", 2), ("three", 3)):
        (tmp_path / folder).mkdir()
        grader = "other_grader" if folder == "three" else "neighbour_grader"
        (tmp_path / folder / f"{grader}.py").write_text(f"def grade():\n    return {value}\n")
        (tmp_path / folder / "mine.py").write_text(f"from {grader} import grade\nvalue = grade()\n")
    (tmp_path / "one" / "colorsys.py").write_text("raise RuntimeError('in place of an installed module')\n")
    (tmp_path / "one" / "colours.py").write_text("import colorsys\nvalue = colorsys.rgb_to_hsv(0, 0, 1)[2]\n")
    assert load_reference(f"{tmp_path}/one/mine.py:value") == 1
    assert load_reference(f"{tmp_path}/three/mine.py:value") == 3
    sys.modules.pop("colorsys", None)
    assert load_reference(f"{tmp_path}/one/colours.py:value") == 1
    with pytest.raises(ConfigError, match=r"two/mine.py got neighbour_grader.py from .*one, which another component"):
        load_reference(f"{tmp_path}/two/mine.py:value")
    del sys.modules["neighbour_grader"], sys.modules["other_grader"]


COMPLETE = '''
import numpy as np
from atropos_core import Options, Provider
from atropos_core.builtin.local import LocalBridge
from atropos_core.builtin.progress import ConsoleSink
from atropos_core.builtin.toy import ToyEngine
from atropos_core.interfaces import Sink
from atropos_core.plugins.options import NoOptions

class Quiet(Sink):
    """Records nothing."""
    async def step(self, step, metrics, groups):
        pass

class Unfinished(Sink):
    pass

class Sized(Quiet):
    class Options(Options):
        size: int = 3
    def __init__(self, options, context):
        self.size, self.seed = options.size, context.seed

class NoModel(Quiet):
    Options = 7

async def one(task, episodes):
    return np.ones(len(episodes))

def of_trl(completions, answer, **kwargs):
    return [1.0 for _ in completions]

def late(task, episodes):
    return np.ones(len(episodes))

def make():
    return Quiet()

class Half:
    async def open(self, sources): ...
    def draw(self, n): ...

class Dumb(LocalBridge):
    pass

class Far(LocalBridge):
    transports = {"pigeon"}

class Near(LocalBridge):
    transports = {"in_process"}

class Graded:
    runs_in = "process"

    async def __call__(self, task, episodes):
        return np.ones(len(episodes))

class Apart(Near):
    runs_in = "process"

class Nowhere(Quiet):
    runs_in = "elsewhere"

made = Sized.__new__(Sized)
offered = Provider("x", "said by itself", NoOptions, lambda o, c: Quiet(), requires=frozenset({"numpy"}))
'''
KINDS_OF = {
    "environment", "reward", "engine", "trainer", "loss", "bridge", "curriculum", "transform", "teacher", "sink", "adapter",
    "sandbox", "launcher",
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (made := tmp_path / "parts.py").write_text(COMPLETE)
    return made


def built(kind: str, reference: str, **options: Any) -> Any:
    provider = load_plugins([]).registry.find(kind, reference).provider
    context = RunContext(directory=Path(), model=Path(), seed=11)
    return provider.build(provider.options.model_validate(options), context)


@pytest.mark.parametrize(
    ("file", "imports"),
    [
        ("alone.py", "import json"),
        (
            "json/own.py",
            "import json, json.decoder\nfrom json import loads",
        ),  # the folder is called as a module of Python
        ("_pytest/own.py", "import _pytest.nodes"),  # as an installed package, which is what the file imports
        ("plain/one.py", "from .two import N"),
        ("plain/one.py", "from plain.two import N"),
        ("plain/one.py", "from plain import two"),
        ("plain/one.py", "def f():\n    import plain.two as two\nf()"),
        ("plain/deep/one.py", "from ..two import N"),
        ("regular/one.py", "from . import two, N"),
        ("regular/__init__.py", "from .two import N"),
        ("regular/deep/one.py", "from regular.two import N"),
        ("regular/one.py", "import two"),  # as a file that Python is started with
    ],
)
def test_a_file_of_a_package_imports_as_it_does_in_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, imports: str
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    own = f"{abs(hash((file, imports)))}"  # a package's name is taken once it is imported
    for package in (f"plain{own}", f"regular{own}"):
        (tmp_path / package / "deep").mkdir(parents=True)
        (tmp_path / package / "two.py").write_text("N = 2\n")
    for folder in ("", "deep"):
        (tmp_path / f"regular{own}" / folder / "__init__.py").write_text("N = 2\n")
    place, _, _ = file.partition("/")
    path = tmp_path / file.replace(place, place + own, place in ("plain", "regular"))
    path.parent.mkdir(exist_ok=True)
    for package in ("plain", "regular"):
        imports = re.sub(rf"\b{package}\b", package + own, imports)
    path.write_text(f"{imports}\nclass Mine:\n    pass\n")
    made = load_reference(f"{path}:Mine")
    assert place_of(made) == f"{path}:Mine" and load_reference(place_of(made)) is made


def test_of_two_packages_of_one_name_the_second_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for folder in ("first", "second"):
        (tmp_path / folder / "twofold").mkdir(parents=True)
        (tmp_path / folder / "twofold/common.py").write_text(f"HERE = {folder!r}\n")
        (tmp_path / folder / f"twofold/{folder}.py").write_text("from twofold.common import HERE\n")
    assert load_reference(f"{tmp_path}/first/twofold/first.py:HERE") == "first"
    with pytest.raises(ConfigError, match="imports from its package 'twofold', and .*/first/twofold is found first"):
        load_reference(f"{tmp_path}/second/twofold/second.py:HERE")


def test_an_installed_class_is_recorded_by_its_module():
    from collections import OrderedDict
    from json import JSONDecoder

    from atropos_env_gsm8k.environment import Gsm8k

    assert place_of(JSONDecoder) == "json.decoder:JSONDecoder" and place_of(OrderedDict) == "collections:OrderedDict"
    assert place_of(Gsm8k) == "atropos_env_gsm8k.environment:Gsm8k"
    assert place_of(pytest.Item) == "_pytest.nodes:Item"


def test_every_kind_of_component_can_be_given_by_reference():
    assert set(KINDS) == KINDS_OF
    for kind in KINDS:
        with pytest.raises(ConfigError, match="there is no file"):
            load_plugins([]).registry.find(kind, "./nothing.py:X")


def test_a_class_an_instance_a_function_and_a_provider_serve(file: Path):
    assert type(built("sink", f"{file}:Quiet")).__name__ == "Quiet"
    assert type(built("sink", f"{file}:make")).__name__ == "Quiet"
    assert built("sink", f"{file}:made") is load_reference(f"{file}:made")
    assert built("reward", f"{file}:one") is load_reference(f"{file}:one")
    provider = load_plugins([]).registry.find("sink", f"{file}:offered").provider
    assert (provider.name, provider.summary, provider.requires) == (
        f"{file}:offered", "said by itself", frozenset({"numpy"}),
    )  # fmt: skip


def test_options_come_first_and_the_context_by_its_name(file: Path):
    sized = built("sink", f"{file}:Sized", size=5)
    assert (sized.size, sized.seed) == (5, 11)
    with pytest.raises(ConfigError, match=r"unknown key 'sink.mine.siz'.*Did you mean 'size'"):
        resolve_component(load_plugins([]).registry, "sink", "sink.mine", Component(use=f"{file}:Sized", siz=5))


def test_a_class_says_of_itself_what_a_plugin_says_in_its_provider(file: Path):
    provider = load_plugins([]).registry.find("bridge", f"{file}:Near").provider
    assert provider.transports(NoOptions()) == {"in_process"} and provider.runs_in == "here"
    assert load_plugins([]).registry.find("reward", f"{file}:Graded").provider.runs_in == "process"


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("sink", "Quie", "there is no 'Quie' in it. Did you mean 'Quiet'"),
        ("sink", "Unfinished", r"lacks step\(\), which every sink has"),
        (
            "engine",
            "Quiet",
            "not a class derived from atropos_core.Engine.*That is for a section of kind 'sink'.*\n.*class Name.atropos_core.Engine",
        ),
        ("engine", "made", "not a class derived from atropos_core.Engine"),
        ("reward", "Quiet", r"is not a reward, but.*\n.*with __call__\(\)"),
        ("reward", "late", "is a function, and a reward is awaited.\n.*async def"),
        ("transform", "late", "a transform is awaited"),
        (
            "reward",
            "of_trl",
            "takes `completions`, as TRL's reward functions do.*\n.*--env dataset:FILE, with score = ",
        ),
        ("curriculum", "Half", r"lacks settle\(\), state\(\) and load\(\)"),
        ("bridge", "Dumb", 'does not say how weights travel.*\n.*transports = {"in_process"}'),
        ("bridge", "Far", "there is no transport 'pigeon'. Choose one of: in_process"),
        ("sink", "NoModel", "Options is 7"),
        ("sink", "Nowhere", "runs_in is 'here' or 'process', not 'elsewhere'"),
        ("bridge", "Apart", 'runs_in = "process" is of engines, trainers and rewards; a bridge lives'),
        ("loss", "one", "is not a loss, but.*\n.*trainer's decorator"),
        ("sink", "", "has 5 sinks: say which"),
    ],
)
def test_what_is_wrong_with_a_component_of_ones_own_is_named(file: Path, kind: str, name: str, said: str):
    with pytest.raises(ConfigError, match=said):
        load_plugins([]).registry.find(kind, f"{file}:{name}" if name else str(file))


def test_a_relative_place_in_a_run_file_begins_at_the_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/run.toml").write_text(
        '[sink.mine]\nuse = "./parts.py:Quiet"\n[reward.mix]\nuse = "ensemble"\n[reward.mix.members.a]\nuse = "../more.py:one"\n'
        '[trainer]\nloss = "l.py:mine"\n[environment.agent]\nfunction = "./here.py:main"\n'
    )
    monkeypatch.chdir(tmp_path)
    values = read_file(Path("runs/run.toml")).values
    assert values["sink"]["mine"]["use"] == f"{tmp_path}/runs/parts.py:Quiet"
    assert values["reward"]["mix"]["members"]["a"]["use"] == f"{tmp_path}/more.py:one"
    assert values["trainer"]["loss"] == f"{tmp_path}/runs/l.py:mine"
    assert values["environment"]["agent"]["function"] == "./here.py:main", (
        "which that environment looks for by its own rule"
    )

"""Every recipe: its header, its plan on the hardware that it states, and the commands that list, print and run it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from atropos_core.cli import run_app
from atropos_core.config.run_file import read_file
from atropos_core.errors import ConfigError
from atropos_recipes import headers
from atropos_recipes.headers import FIELDS, MEASURED, names, path_of, read
from tests.pages.blocks import BLOCKS
from tests.planned_recipes import CLUSTERS, arguments, numbers, plan_of, prepare

AT_HOME = [name for name in names() if not name.startswith(CLUSTERS)]
HERE = ["--set", "oversubscribe=true"]  # the tests' machine may be small; another test plans on the recipe's own
TOLERANCE = 0.05  # of a figure in a header: the plan may change a little without a new header


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("stand-ins"))


def test_there_is_a_recipe_for_each_situation() -> None:
    found = set(names())
    for situation in (
        "laptop-",
        "24gb-",
        "80gb-",
        "8gpus-",
        "ray-",
        "slurm-",
        "-agent",
        "-tools",
        "-qlora",
        "-self-play",
        "-to-",
    ):
        assert any(situation in f"{name}" for name in found), situation


@pytest.mark.parametrize("name", names())
def test_a_header_is_in_the_fixed_form(name: str) -> None:
    recipe = read(name)
    assert recipe.title.endswith(".") and len(recipe.title) < 120
    assert all(getattr(recipe, field) for field in FIELDS)
    assert recipe.measured.startswith(MEASURED)
    assert recipe.install.startswith("pip install ")
    assert all(len(line) <= 120 for line in recipe.path.read_text().splitlines())
    if recipe.measured == "no":
        assert recipe.result.startswith("no figure"), "a recipe that was not measured has no own figure"
    elif not recipe.measured.startswith("here"):
        assert re.search(r"\d %.*\(.*/", recipe.result), "a figure, and its source in brackets"


@pytest.mark.parametrize("name", names())
def test_what_a_header_installs_has_what_the_recipe_names(name: str) -> None:
    recipe, values = read(name), read_file(path_of(name)).values
    extras = {extra for found in re.findall(r"atropos-rl\[([\w,-]+)\]", recipe.install) for extra in found.split(",")}
    needed = {
        "vllm": values.get("engine", {}).get("use") == "vllm",
        "lora": values.get("bridge", {}).get("use") == "lora",
        "nccl": values.get("bridge", {}).get("use") == "nccl",
        "distillation": "teacher" in values,
        "agents": "agent" in values["environment"],
        "textarena": any(one.get("use") == "textarena" for one in values["environment"].values()),
        "slurm": values.get("launcher", {}).get("use") == "slurm",
        "ray": values.get("launcher", {}).get("use") == "ray",
    }
    assert {extra for extra, is_needed in needed.items() if is_needed} == extras & needed.keys()
    assert ("[hub]" in recipe.install) == ('source = "hub"' in recipe.path.read_text())


@pytest.mark.parametrize("name", AT_HOME)
def test_a_recipe_fits_the_hardware_that_it_states(name: str, folder: Path) -> None:
    recipe = read(name)
    made = plan_of(recipe, folder)
    assert recipe.devices and made.available == recipe.devices
    assert set(made.needed()) <= set(recipe.devices), "every device that it uses is stated"
    assert not made.too_small()


@pytest.mark.parametrize("name", AT_HOME)
def test_the_memory_in_a_header_is_what_the_plan_says(name: str, folder: Path) -> None:
    recipe = read(name)
    needed = plan_of(recipe, folder).needed()
    said = numbers(recipe.memory)
    for device, size in needed.items():
        assert any(abs(one - size / 1e9) <= max(TOLERANCE * size / 1e9, 0.1) for one in said), (
            f"{device} needs {size / 1e9:.1f} GB, and the header says {recipe.memory!r}: run `python -m tests.planned_recipes`"
        )


@pytest.mark.parametrize("name", names())
def test_a_dry_run_of_a_recipe_ends_well(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = run_app(["run", f"recipe:{name}", *arguments(read(name), folder), *HERE, "--dry-run", "--dir", "runs/mine"])
    said = capsys.readouterr()
    assert ended == 0, said.out + said.err
    assert "sbatch" in said.out if name.startswith("slurm") else "tasks to train on" in said.out
    assert not Path("runs/mine/config.toml").exists()


def test_the_table_has_every_recipe_and_if_it_was_measured(atropos) -> None:
    said = atropos("recipes").out
    for name in names():
        recipe = read(name)
        [row] = [line for line in said.splitlines() if line.split(" ")[0] == name]
        assert recipe.model in row and row.rstrip().endswith(recipe.measured)


def test_a_recipe_is_printed_as_it_is(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run_app(["recipes", "24gb-qwen2.5-1.5b-lora"]) == 0
    assert capsysbinary.readouterr().out == path_of("24gb-qwen2.5-1.5b-lora").read_bytes()


def test_a_copy_of_a_recipe_is_the_same_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "24gb-qwen2.5-1.5b-lora"
    flags = arguments(read(name), folder)
    assert run_app(["recipes", name]) == 0
    Path("my-run.toml").write_text(capsys.readouterr().out)
    shown = []
    for file in (f"recipe:{name}", "my-run.toml"):
        assert run_app(["config", "show", file, *flags, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert {"flag", file} < {row["from"] for row in rows}
        shown.append([(row["path"], row["value"]) for row in rows])
    assert shown[0] == shown[1]


def test_flags_go_over_a_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "24gb-qwen2.5-1.5b-lora"
    changed = ["--steps", "7", "--set", "trainer.lora.rank=8"]
    assert run_app(["config", "show", f"recipe:{name}", *arguments(read(name), folder), *changed, "--json"]) == 0
    rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["training.steps"]["value"], rows["training.steps"]["from"]) == (7, "flag")
    assert (rows["trainer.lora.rank"]["value"], rows["trainer.lora.alpha"]["value"]) == (8, 32.0)


def test_a_plan_of_a_recipe_prints_a_command_with_its_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "24gb-qwen2.5-1.5b-lora"
    assert run_app(["plan", f"recipe:{name}", *arguments(read(name), folder), "--gpu", "24", "--host", "32"]) == 0
    assert f"atropos run recipe:{name} " in capsys.readouterr().out


def test_a_name_that_there_is_not_is_answered_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["recipes", "24gb"], ["run", "recipe:24gb", "--dry-run"]):
        assert run_app(words) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "'24gb' is not a recipe" in said and "24gb-qwen2.5-1.5b-lora" in said


def test_without_the_package_a_recipe_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATROPOS_DISABLE_PLUGINS", "recipes")
    for words in (["recipes"], ["run", "recipe:24gb-qwen2.5-1.5b-lora"]):
        assert run_app(words) == 2
        assert "pip install atropos-recipes" in " ".join(capsys.readouterr().err.split())


def test_a_file_whose_name_has_a_colon_is_still_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipe:mine").write_text('model = "tiny"\n[environment.gsm8k]\n[training]\nsteps = 3\n')
    assert run_app(["config", "show", "recipe:mine", "--json"]) == 0
    rows = {row["path"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert rows["training.steps"] == 3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('model = "tiny"\n', "its header needs a title"),
        ("# Title.\n#\n# hardware: a laptop\n", "needs a title, and then hardware, install"),
        ("# Title.\n#\n# speed: high\n", "'speed: high' is neither"),
    ],
)
def test_a_header_that_is_not_in_the_form_is_refused(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text(text)
    monkeypatch.setattr(headers, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=why):
        read("mine")


def test_an_unknown_name_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="'none' is not a recipe"):
        path_of("none")


def test_the_commands_of_the_page_do_what_it_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The runs as dry runs, with stand-ins."""
    commands = [
        line
        for block in BLOCKS
        if block.page == "docs/recipes.md" and block.language == "sh"
        for line in block.commands
    ]
    assert len(commands) == 5
    stand_ins = [*arguments(read("24gb-qwen2.5-1.5b-lora"), folder), *HERE]
    for command in commands:
        typed, _, redirected = command.partition(" > ")
        words = shlex.split(typed)[1:]
        dry = [*stand_ins, *([] if "--dry-run" in words else ["--dry-run"])] if words[0] == "run" else []
        assert run_app([*words, *dry]) == 0, command
        said = capsys.readouterr().out
        if redirected:
            Path(redirected).write_text(said)
        assert (
            "tasks to train on" if dry else "24gb-qwen2.5-1.5b-lora" if not redirected else "[trainer.lora]"
        ) in said


def test_the_page_shows_every_recipe_as_its_header_has_it() -> None:
    from tools import make_recipes_page as made

    written = made.PAGE.read_text()
    assert written == made.page(written), "run `python -m tools.make_recipes_page`"
    table = written.partition(made.TABLE)[2].partition(made.TABLE_ENDS)[0]
    for name in names():
        [row] = [line for line in table.splitlines() if line.startswith(f"| [{name}](")]
        assert read(name).model in row and read(name).measured in row
    assert all(f"\n### {name}\n" in written for name in names())


def test_the_page_notices_a_recipe_that_is_missing_from_it(tmp_path: Path) -> None:
    from tools import make_recipes_page as made

    written = made.PAGE.read_text()
    [row] = [line for line in written.splitlines() if line.startswith("| [24gb-qwen2.5-1.5b-lora](")]
    assert made.page(written.replace(row + "\n", "")) == written != written.replace(row + "\n", "")

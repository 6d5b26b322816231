"""`atropos plan`: what it says fits, fits by the run's own plan, and one step more does not."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from atropos_core.cli import run_app
from atropos_core.models.model_size import read
from atropos_trainer_grpo.plan_command import memory_bytes
from atropos_trainer_grpo.plan_search import SEQUENCES, WAYS, Fitted, best
from tests.conftest import REPOSITORY
from tests.pages.blocks import BLOCKS
from tests.shapes import write_shape


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def eight_billion(tmp_path: Path) -> Path:
    """Qwen3-8B's shape, as a header of safetensors says it, and no weights."""
    return write_shape("Qwen/Qwen3-8B", tmp_path / "eight", max_position_embeddings=131_072)


def said(capsys, *arguments: str, code: int = 0) -> str:
    assert run_app(["plan", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def rows(text: str) -> dict[str, tuple[int, int]]:
    """Return the longest context and the tokens at once for each way, 0 if there are none."""
    found = {}
    for line in text.splitlines():
        cells = [cell for cell in line.split("  ") if cell.strip()]
        if cells and cells[0].strip() in {way.name for way in WAYS}:
            numbers = [cell.strip().split(" ")[0].replace(",", "") for cell in cells[2:4]]
            found[cells[0].strip()] = tuple(int(number) if number.isdigit() else 0 for number in numbers)
    return found


def test_the_command_that_it_names_is_planned_by_a_dry_run_and_fits(capsys):
    text = said(capsys, "--model", "tiny")
    assert set(rows(text)) == {way.name for way in WAYS if not way.on_gpu}, "there is no other memory"
    command = shlex.split(next(line for line in text.splitlines() if line.startswith("  atropos run")))
    assert command[command.index("--env") + 1] == "NAME", "which is for the reader to say"
    assert run_app([*("gsm8k" if word == "NAME" else word for word in command[1:]), "--dry-run"]) == 0


def test_what_an_eight_billion_model_needs_of_a_small_card_and_of_a_large_one(capsys, eight_billion):
    def planned(gpu: str, host: str = "256") -> dict[str, tuple[int, int]]:
        return rows(said(capsys, "--model", str(eight_billion), "--gpu", gpu, "--host", host, "--context", "2048"))

    small, large = planned("48"), planned("80")
    assert small["whole model"] == large["whole model"] == (0, 0)  # parameters, fp32 masters and moments: 115 GB
    assert 0 < small["LoRA, checkpointing"][0] < large["LoRA, checkpointing"][0]
    assert 2048 < small["LoRA, checkpointing"][1] <= large["LoRA, checkpointing"][1]
    offloading = "LoRA, 4-bit base, checkpointing, offloading"
    assert large["LoRA, checkpointing"][0] < large[offloading][0] and small["whole model, offloading"][0] > 0
    assert planned("80", host="24")[offloading][0] < large[offloading][0], "layer inputs are in host memory"
    assert planned("48", host="64")["whole model, offloading"] == (0, 0), "masters and moments are: 98 GB"
    assert (
        small["LoRA"][1] < small["LoRA, checkpointing"][1]
        and small["LoRA"][0] < large["LoRA"][0] < large["LoRA, checkpointing"][0]
    )


def test_the_sizes_that_it_prints_are_those_that_a_run_chooses(capsys, eight_billion):
    given = ["--model", str(eight_billion), "--gpu", "48", "--host", "256"]
    text = said(capsys, *given, "--context", "4096")
    command = shlex.split(next(line for line in text.splitlines() if line.startswith("  atropos run")))
    sets = [command[at + 1] for at, word in enumerate(command) if word == "--set"]
    from atropos_core.cli.options import configure
    from atropos_core.launch.sizes import plan_run

    bridge = command[command.index("--bridge") + 1]
    sizes = ("trainer.tokens_per_microbatch", "engine.")
    without = [one for one in sets if not one.startswith(sizes) or one.startswith("engine.devices")]
    assert len(without) < len(sets), "sizes are printed that are not the defaults"
    loaded, model, plugins = configure(model=str(eight_billion), bridge=bridge, env=["gsm8k"], changes=without)
    plan = plan_run(loaded, model, plugins, available={"cuda:0": 48 << 30, "cpu": 256 << 30})
    assert plan.sizes.fit and plan.sizes.changed
    assert {f"{path}={value}" for path, value in plan.sizes.changed.items()} == set(sets) - set(without)


def test_a_config_without_weights_is_planned_as_the_whole_model(capsys, tmp_path, model_of):
    def planned(directory: Path) -> list[str]:
        assert run_app(["plan", "--model", str(directory), "--gpu", "24", "--context", "600"]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if " GB" in line or "take" in line][1:]

    for kind, tied in (("qwen3", True), ("llama", False)):
        whole = shutil.copytree(model_of(kind, tied), tmp_path / kind)
        capsys.readouterr()  # what making the model has printed
        config = json.loads((whole / "config.json").read_text())
        (whole / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
        with_weights, size = planned(whole), read(whole)
        (whole / "model.safetensors").unlink()
        assert planned(whole) == with_weights and len(with_weights) > len(WAYS)
        assert read(whole) == size


FILES = {
    "an adapter": '[bridge]\nuse = "lora"\n[trainer.lora]\nrank = 8\n',
    "switches": '[trainer]\ngradient_checkpointing = true\noptimizer = "adamw_8bit"\n',
    "some layers": "[trainer]\ngradient_checkpointing = true\ncheckpointed_layers = 2\n",
    "offloading": "[trainer]\ngradient_checkpointing = true\nactivation_offloading = true\noptimizer_offloading = true\n",
    "a base in 4 bits": '[bridge]\nuse = "lora"\n[trainer.lora]\nrank = 8\nquantization = "nf4"\n',
    "another evaluation": "[evaluation]\nmax_tokens = 900\n[trainer]\nlearning_rate = 1e-5\n",
}


@pytest.mark.parametrize("file", FILES)
def test_the_command_of_each_way_is_the_plan_that_was_searched_whatever_the_file_has(tmp_path, eight_billion, file):
    from atropos_core.cli.options import configure
    from atropos_core.launch.memory_plan import plan_memory
    from atropos_core.launch.plan import make_plan
    from atropos_trainer_grpo.plan_command import typed_command
    from atropos_trainer_grpo.plan_search import Fitting

    path, model, has = tmp_path / "run.toml", str(eight_billion), {"cuda:0": 80 << 30, "cpu": 256 << 30}
    path.write_text(FILES[file] + "[environment.gsm8k]\n")
    devices = {"engine.devices": ["cuda:0"], "trainer.devices": ["cuda:0"]}
    loaded, resolved, plugins = configure(path, model=model, flags=devices)
    fitting, planned = Fitting(loaded.config, resolved, plugins, Path("runs"), has), 0
    for one in fitting.each():
        if not one.microbatch:
            continue
        words = shlex.split(typed_command(one, fitting, path, model, None, None, fitting.wanted, True, True))
        sets = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
        typed, _, _ = configure(path, model=model, bridge=words[words.index("--bridge") + 1], changes=sets)
        plan = make_plan(typed.config, resolved, plugins, rollouts=False)
        assert plan_memory(plan, Path("runs"), has).needed() == one.needed, one.way.name
        planned += 1
    assert planned >= 3


def test_bridge_engine_and_settings_are_those_that_are_named(capsys, eight_billion):
    given = ["--model", str(eight_billion), "--gpu", "200"]
    text = said(capsys, *given, "--bridge", "checkpoint", "--engine", "hf", "--set", "sampling.max_tokens=1000")
    assert "at 1,512 tokens" in text
    assert [line.split()[2] for line in text.splitlines() if line.startswith("whole model  ")] == ["checkpoint"]
    command = shlex.split(next(line for line in text.splitlines() if line.startswith("  atropos run")))
    assert command[command.index("--engine") + 1] == "hf" and "sampling.max_tokens=1000" in command
    assert "on engine 'toy', which runs in the run's own process" in said(capsys, *given, "--engine", "toy", code=2)


def test_the_commands_of_the_page_print_a_table_and_a_command(capsys):
    [block] = [one for one in BLOCKS if one.page == "docs/run-file.md" and one.first.startswith("atropos plan")]
    for line in block.text.splitlines():
        text = said(capsys, *shlex.split(line)[2:])
        assert set(rows(text)) == {way.name for way in WAYS if "--gpu" in line or not way.on_gpu}
        assert "  atropos run --model tiny" in text


def test_vllm_on_the_trainers_card_is_to_sleep_during_updates_and_more_fits_then(capsys, eight_billion):
    given = [
        "--model",
        str(eight_billion),
        "--gpu",
        "80",
        "--host",
        "256",
        "--engine",
        "vllm",
        "--set",
        "engine.memory_share=0.75",
    ]
    text = said(capsys, *given, "--context", "65536")
    command = shlex.split(next(line for line in text.splitlines() if line.startswith("  atropos run")))
    assert "engine.enable_sleep_mode=true" in command, text
    awake = said(capsys, *given, "--set", "engine.enable_sleep_mode=false")
    offloading = "whole model, offloading"
    assert rows(text)[offloading][0] > rows(awake)[offloading][0]
    assert "enable_sleep_mode=true" not in awake
    asynchronous = said(capsys, *given, "--set", "training.max_staleness=1")
    assert "enable_sleep_mode" not in asynchronous, "it would be refused there"


def test_a_bridge_that_is_named_is_kept(capsys, eight_billion):
    given = ["--model", str(eight_billion), "--gpu", "200"]
    for named in (("--bridge", "lora"), ("--set", "bridge.use=lora")):
        text = said(capsys, *given, *named)
        command = shlex.split(next(line for line in text.splitlines() if line.startswith("  atropos run")))
        assert "bridge 'lora' does not carry it" in text and text.count("take: LoRA") == 1
        assert command.count("--bridge") + command.count("bridge.use=lora") == 1, "or it is given twice"


def test_precisions_that_a_bridge_cannot_share_go_by_another_one(capsys):
    assert "--bridge checkpoint" in said(capsys, "--model", "tiny", "--set", "engine.dtype=bfloat16",
                                         "--set", "training.max_logprob_diff=0.1")  # fmt: skip
    refused = said(capsys, "--model", "tiny", "--set", "engine.dtype=bfloat16", "--bridge", "ipc", code=2)
    assert "the two are one memory" in refused


def test_paths_with_spaces_are_typed_as_they_must_be(capsys, tmp_path, eight_billion):
    directory = tmp_path / "my model"
    directory.symlink_to(eight_billion)
    text = said(capsys, "--model", str(directory), "--gpu", "200", "--host", "256")
    assert str(directory) in shlex.split(next(line for line in text.splitlines() if line.startswith("  atropos run")))


def test_no_room_is_an_error_that_says_what_to_do(capsys, eight_billion):
    text = said(capsys, "--model", str(eight_billion), "--gpu", "8", code=2)
    assert "no way to train this model has room" in text and "--gpu 80" in text


def test_a_model_that_plans_prompts_do_not_fit_into_is_refused(capsys, model_of, tmp_path):
    directory = shutil.copytree(model_of(), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    assert "has 256 positions, and plans count a prompt of 512 tokens" in said(
        capsys, "--model", str(directory), code=2
    )
    (directory / "config.json").write_text("[]")
    assert "does not say how large its model is" in said(capsys, "--model", str(directory), code=2)


def test_a_model_that_is_not_packed_is_planned_in_rows_and_the_plan_says_why(capsys, model_of, tmp_path):
    directory = shutil.copytree(model_of(), tmp_path / "hybrid")
    (directory / "model.safetensors").unlink()
    config = AutoConfig.for_model(
        "lfm2", vocab_size=37, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, eos_token_id=1,
        num_hidden_layers=2, layer_types=["conv", "full_attention"], max_position_embeddings=1024, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    text = said(capsys, "--model", str(directory))
    assert "trainer rows: short convolutions would keep state across packed sequences; prompts are not shared" in text
    assert "prompt counts once" not in text and "take: whole model" in text


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--context", "512"], "leaves no room for a reply"),
        (["--set", "trainer.use=toy"], "knows the ways of trainer 'grpo'"),
        *(
            (["--gpu", wrong], f"--gpu '{wrong}' is not a size of memory")
            for wrong in ("0", "24 TB", "nan", "1e3", "-1", "200000")
        ),
        (["--host", "all"], "--host 'all' is not a size of memory"),
        (["--bridge", "nope"], "no bridge named 'nope'"),
        (["--engine", "nope"], "no engine named 'nope'"),
        (["--bridge", "prompt"], "bridge 'prompt' does not carry it"),
        (["--set", "trainer.optimizer=nope"], "optimizer"),
        (["--set", "trainer.tokens_per_microbatch=-1"], "tokens_per_microbatch"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys, arguments, what):
    assert what in said(capsys, "--model", "tiny", *arguments, code=2)


@pytest.mark.parametrize(
    ("typed", "size"),
    [("24", 24 * 2**30), ("24GB", 24 * 10**9), ("24 gb", 24 * 10**9), ("24GiB", 24 * 2**30), ("1.5", 3 * 2**29)],
)
def test_a_size_without_a_unit_is_that_of_memory_as_it_is_sold(typed, size):
    assert memory_bytes("--gpu", typed) == size


def test_what_is_printed_is_in_decimal_gigabytes(capsys):
    text = said(capsys, "--model", "tiny", "--gpu", "24", "--host", "64GB")
    assert "cuda:0 has 25.8 GB" in text and "cpu has 64.0 GB" in text and "GiB" not in text


def test_the_cheapest_way_with_room_for_several_sequences_is_taken():
    def fitted(way: int, microbatch: int) -> Fitted:
        return Fitted(WAYS[way], "ipc", 100, microbatch, {})

    assert best([fitted(0, 100), fitted(1, 100 * SEQUENCES), fitted(4, 9000)], 100) == fitted(1, 100 * SEQUENCES)
    assert best([fitted(0, 99), fitted(1, 150), fitted(4, 120)], 100) == fitted(1, 150)
    assert best([fitted(0, 99)], 100) is None


def test_the_pages_table_of_what_fits_is_what_the_plan_says(eight_billion):
    from atropos_core.cli.options import configure
    from atropos_core.plugins.manager import load_plugins
    from atropos_trainer_grpo.plan_search import Fitting

    ways, plugins, seen = {way.name: way for way in WAYS}, load_plugins(), 0
    for line in (REPOSITORY / "docs/gpu.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] not in ways or len(cells) != 4:
            continue
        for gib, said in zip((24, 80), cells[2:], strict=True):
            flags = {"engine.devices": ["cuda:0"], "trainer.devices": ["cuda:0"], "sampling.max_tokens": 2048 - 512}
            engine = "vllm" if "vllm" in cells[1] else "hf"
            loaded, model, _ = configure(model=str(eight_billion), engine=engine, flags=flags)
            fitting = Fitting(loaded.config, model, plugins, Path("runs"), {"cuda:0": gib << 30, "cpu": 256 << 30})
            found = fitting.fitted(ways[cells[0]]).context
            assert said == (f"{found // 1000}K" if found else "does not fit"), f"{line}: {found:,}"
            seen += 1
    assert seen == 12

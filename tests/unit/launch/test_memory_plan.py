"""The memory plan: how uses add up, what is refused, and what is read of a model without loading it."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from atropos_core.config.run_file import Layer, load
from atropos_core.errors import PluginError
from atropos_core.launch.builder import contexts
from atropos_core.launch.memory_plan import MemoryPlan, PlanRow, in_turn, peak, plan_memory, table
from atropos_core.launch.plan import make_plan
from atropos_core.models.model_size import read
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.model_provider import MemoryUse

COPIED = {"bridge": {"use": "checkpoint"}}


def plan(*rows: PlanRow, **available: int) -> MemoryPlan:
    return MemoryPlan(rows, available)


def row(size: int, *, component: str = "trainer", counts: bool = True, **use: str) -> PlanRow:
    return PlanRow(component, MemoryUse(use.pop("what", "parameters"), size, **use), counts)


def test_a_copy_that_two_share_counts_once_and_only_on_one_device():
    shared = (row(10, component="engine", shared="weights"), row(10, shared="weights"))
    assert plan(*shared, row(5)).needed() == {"cpu": 15}
    apart = (row(10, component="engine", shared="weights", device="cuda:0"), row(10, shared="weights"))
    assert plan(*apart).needed() == {"cuda:0": 10, "cpu": 10}
    assert plan(row(8, component="engine", shared="weights"), row(10, shared="weights")).needed() == {"cpu": 10}


def test_of_a_components_phases_the_largest_counts_on_each_device():
    lasting, first, second = MemoryUse("a", 5), MemoryUse("b", 7, phase="one"), MemoryUse("c", 3, phase="two")
    third, there = MemoryUse("d", 5, phase="two"), MemoryUse("e", 9, "cuda:0", phase="one")
    kept = peak([lasting, first, second, third, there])
    assert kept == [lasting, second, third, there]


def test_what_only_sampling_needs_and_what_only_the_update_needs_count_in_turn_on_each_device():
    rows = [
        row(10, component="engine"), row(4, component="engine", phase="sampling"), row(3, component="teacher", phase="rescoring"),
        row(9, component="engine", phase="rescoring", counts=False), row(6, phase="update"), row(5, phase="opening"),
        row(8, phase="update", device="cuda:0"), row(2, component="engine", phase="sampling", device="cuda:0"),
    ]  # fmt: skip
    assert MemoryPlan(tuple(rows), {}).needed() == {"cpu": 28, "cuda:0": 10}
    assert MemoryPlan(tuple(in_turn(rows)), {}).needed() == {"cpu": 22, "cuda:0": 8}


@pytest.mark.parametrize(("settings", "taken_in_turn"), [({}, True), ({"training": {"max_staleness": 1}}, False)])
def test_an_on_policy_run_alone_holds_in_turn_what_sampling_and_the_update_need(tmp_path, settings, taken_in_turn):
    plugins = load_plugins()
    config = load([Layer("run.toml", {"environment": {"gsm8k": {}}, **settings})]).config
    made = plan_memory(make_plan(config, plugins.resolve_model("tiny"), plugins), tmp_path)
    counted = {one.use.phase for one in made.rows if one.counts and one.use.device == "cpu"}
    assert ("update" in counted and bool({"sampling", "rescoring"} & counted)) is not taken_in_turn


def test_a_device_is_too_small_if_less_is_known_to_be_there_than_is_needed():
    made = plan(row(int(60e9)), row(int(30e9), component="engine"), row(int(500e9), counts=False), cpu=int(80e9))
    assert made.too_small() == ["cpu"]
    assert [one.component for one in made.largest("cpu")] == ["trainer", "engine"]
    assert replace(made, available={"cpu": int(90e9)}).too_small() == []
    assert replace(made, available={}).too_small() == [], "if nothing is known, nothing is refused"


def test_the_table_says_which_rows_are_the_same_copy_and_which_do_not_count():
    rows, totals = table(
        plan(
            row(int(1e9), component="engine", shared="weights"),
            row(int(1e9), shared="weights"),
            row(int(2e9), phase="update"),
            row(int(1e9), phase="saving", counts=False),
            cpu=int(5e9),
        )
    )
    assert [one[-1] for one in rows] == ["", "the same copy", "update", "saving, less"]
    assert totals == [("cpu", "3.00 GB at most, of 5.00 GB")]


def model(directory: Path, tensors: dict[str, tuple[int, ...]], **config: object) -> Path:
    shape = {
        "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 12,
        "num_hidden_layers": 1, "vocab_size": 10, "dtype": "bfloat16",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(shape | config))
    for number, (name, extents) in enumerate(tensors.items()):
        entry = {name: {"dtype": "BF16", "shape": extents, "data_offsets": [0, 0]}, "__metadata__": {"format": "pt"}}
        header = json.dumps(entry).encode()
        (directory / f"model-{number}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return directory


def test_a_models_size_is_read_from_its_headers(tmp_path):
    found = read(
        model(tmp_path, {"model.embed_tokens.weight": (10, 8), "l.0.q_proj.weight": (8, 8), "l.0.norm.weight": (8,)})
    )
    assert found is not None
    assert found.parameters == 80 + 64 + 8
    assert found.stored_bytes == 2 * found.parameters
    assert found.linear() == {"l.0.q_proj.weight": (8, 8)}
    assert (found.query_width, found.key_width, found.tied, found.norms_heads) == (8, 4, True, False)


def test_experts_and_their_routers_are_not_linear_layers(tmp_path):
    experts = {f"l.0.mlp.experts.{number}.{name}_proj.weight": (6, 8) for number in (0, 11) for name in ("gate", "up")}
    routers = {"l.0.mlp.gate.weight": (12, 8), "l.1.block_sparse_moe.router.weight": (12, 8)}
    linear = {"l.0.q_proj.weight": (8, 8), "l.0.mlp.shared_experts.gate_proj.weight": (6, 8)}
    found = read(model(tmp_path, {**experts, **routers, **linear}))
    assert found is not None
    assert (found.linear(), found.experts()) == (linear, experts)
    rest = 4 * 48 + 2 * 96  # stay as they are if linear layers are held in 8 bits
    assert found.quantized_bytes("int8", 2) == 2 * rest + 64 + 48 + 4 * (8 + 6)


def test_a_directory_that_says_too_little_gives_no_plan(tmp_path):
    assert read(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    assert read(tmp_path) is None
    (tmp_path / "config.json").write_text("no json")
    assert read(tmp_path) is None


def test_a_dry_run_prints_the_plan_and_starts_nothing(atropos, tmp_path):
    ended = atropos("run", "--env", "gsm8k", "--dry-run", "--dir", "run")
    assert ended.code == 0, ended.err
    assert "optimiser moments" in ended.out
    assert "the same copy" in ended.out
    assert "nothing was started" in ended.out
    assert "environment gsm8k: 1,000,000 tasks to train on, " in ended.out
    assert not (tmp_path / "run").exists()


TASKS = """
from atropos_core import Environment, Task

ASKED = ({"role": "user", "content": "hi"},)


class Asks(Environment):
    async def score(self, task, reply):
        return 0.0


class Twice(Asks):
    def tasks(self, split):
        return [Task("same", ASKED)] * 5


class Texts(Asks):
    def tasks(self, split):
        return ["hi", "there"]
"""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--env", "./tasks.py:Twice"), "tasks 0 and 1 of one split both have the id 'same'"),
        (("--env", "./tasks.py:Texts"), "environment 'texts', task 0"),
        (("--env", "gsm8k", "--dir", "tasks.py"), "the run directory tasks.py cannot be made"),
        (("--env", "gsm8k", "--dir", "tasks.py/run"), "tasks.py is not a directory"),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses_before_its_first_step(atropos, tmp_path, arguments, says):
    (tmp_path / "tasks.py").write_text(TASKS)
    ended = atropos("run", "--dry-run", *arguments)
    assert ended.code == 1 and says in " ".join(ended.err.split()), ended.err
    assert [one.name for one in tmp_path.iterdir() if one.name != "__pycache__"] == ["tasks.py"]


@pytest.mark.parametrize(
    ("name", "content", "says", "remedy"),
    [
        ("rows.jsonl", None, "rows.jsonl does not exist", "A relative path starts at"),
        ("rows.jsonl", b"", "rows.jsonl has no tasks", "Write one row a line"),
        ("rows.jsonl", b'{"prompt": "\xe9"}', "rows.jsonl, line 1 is not text in UTF-8", "iconv"),
        (".", None, "has no file of rows", "The kinds of files"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_a_file_that_cannot_be_used_is_refused_before_the_plan_is_printed(
    atropos, tmp_path, name, content, says, remedy, dry
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    dry_run = ("--dry-run",) if dry else ("--model", "toy", "--dir", "run")
    ended = atropos("run", "--env", f"dataset:{name}", *dry_run)
    assert ended.code == 1 and not ended.out, ended.out
    assert says in ended.err and remedy in ended.err.partition("What to do: ")[2], ended.err
    assert not (tmp_path / "run").exists()


def test_files_of_other_environments_are_checked_before_the_plan_is_printed(atropos, tmp_path):
    (tmp_path / "agent.toml").write_text(
        'model = "toy"\n[environment.agent]\nuse = "agent"\ncommand = ["true"]\ntasks = "none.jsonl"\n'
        '[environment.agent.reward]\ncommand = ["true"]\n'
    )
    path = ("--set", "environment.gsm8k.source=path", "--set", "environment.gsm8k.path=none")
    for arguments in (("agent.toml",), ("--env", "gsm8k", *path)):
        ended = atropos("run", *arguments, "--dry-run")
        assert ended.code == 1 and not ended.out and "does not exist" in ended.err, ended.out + ended.err
        assert "What to do: " in ended.err


def test_a_dry_run_finds_missing_data_and_says_which_device_is_not_here(atropos, tmp_path):
    ended = atropos("run", "--env", "dataset:rows.jsonl", "--dry-run")
    assert ended.code == 1 and "rows.jsonl" in ended.err, ended.err
    rows = [json.dumps({"prompt": f"{n} + 1?", "answer": str(n + 1)}) for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    elsewhere = ("--set", "engine.devices=['cuda:7']", "--set", "trainer.devices=['cuda:7']")
    ended = atropos("run", "--env", "dataset:rows.jsonl", "--dry-run", *elsewhere)
    assert ended.code == 0, ended.err
    assert "environment rows: 18 tasks to train on, 2 held out" in ended.out
    assert "this machine has no cuda:7" in ended.err
    ended = atropos(
        "run", "--env", "dataset:rows.jsonl", "--dry-run", "--set", "trainer.devices=['cuda:x']", *elsewhere[:2]
    )
    assert "Traceback" not in ended.err and "cuda:x" in ended.err, ended.err


def test_a_run_that_cannot_fit_ends_before_anything_is_loaded(atropos, tmp_path):
    huge = ("--set", "hub.size_mb=100000000", "--dir", "run")
    ended = atropos("run", "--env", "gsm8k", *huge)
    assert ended.code != 0
    assert "supervisor: hub 100000 GB" in ended.err
    assert "fits, with what is then needed: --set hub.size_mb=" in ended.err
    assert not list((tmp_path / "run" / "logs").glob("*"))
    assert atropos("run", "--env", "gsm8k", "--dry-run", *huge).code != 0
    regardless = atropos("run", "--env", "gsm8k", "--dry-run", *huge, "--set", "oversubscribe=true")
    assert regardless.code == 0, regardless.err
    assert "100000 GB" in regardless.out, "the plan is still printed"


def test_every_context_of_a_run_is_what_its_component_would_be_built_with(tmp_path):
    plugins = load_plugins()
    loaded = load([Layer("run.toml", {"environment": {"gsm8k": {}}, "engine": {"replica": {"second": {}}}, **COPIED})])
    made = make_plan(loaded.config, plugins.resolve_model("tiny"), plugins)
    found = {chosen.label: context for chosen, context in contexts(made, tmp_path)}
    assert found["engine"].transport == found["engine.replica.second"].transport == "checkpoint"
    needs = plan_memory(made, tmp_path)
    engines = [row for row in needs.rows if row.component.startswith("engine") and row.use.what == "parameters"]
    assert len(engines) == 2
    assert not any(row.use.shared for row in engines)


def test_a_component_that_cannot_say_what_it_takes_is_named(tmp_path):
    plugins = load_plugins()
    made = make_plan(
        load([Layer("run.toml", {"environment": {"gsm8k": {}}})]).config, plugins.resolve_model("tiny"), plugins
    )
    trainer = made.single["trainer"]
    broken = replace(trainer.offer, provider=replace(trainer.offer.provider, holds=lambda options, workload: 1 / 0))
    made = replace(made, single={**made.single, "trainer": replace(trainer, offer=broken)})
    with pytest.raises(PluginError, match="trainer: 'grpo' of .* could not say what memory it will take: ZeroDivision"):
        plan_memory(made, tmp_path)

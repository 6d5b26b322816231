"""Bridge "ipc" on a real vLLM: one copy of the weights, its checks against planted faults, and copies."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from atropos_bridge_ipc.bridge import IpcBridge
from atropos_bridge_ipc.config import IpcOptions
from atropos_core.errors import FitError, WeightsMismatch
from atropos_core.plugins.provider import RunContext
from atropos_core.processes.endpoints import LocalEndpoint
from atropos_core.types import Sampling
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.trainer import GrpoTrainer
from tests.vllm.ends import Ends
from tests.vllm.faults_ipc import TENSOR
from tests.vllm.hosted import Hosted, start

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

ANNOUNCED = {"weight_transfer": "atropos_ipc"}
SAMPLING = Sampling(max_tokens=24)
BOUND = 1e-4  # nats, float32


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Hosted]]:
    """Two servers of one Qwen2 (biases, tied embeddings, a vocabulary that is padded): one to share with, one to copy to."""
    folder = tmp_path_factory.mktemp("run")
    made = await asyncio.gather(
        *(start(models["qwen2"], folder / how, announced=ANNOUNCED, transport=how) for how in ("posix_shm", "copy"))
    )
    yield list(made)
    await asyncio.gather(*(one.engine.close() for one in made))


async def connect(
    served: Sequence[Hosted],
    directory: Path,
    *transports: Any,
    model: Path | None = None,
    trainers: Path | None = None,
    end: str = "",
    dtype: Any = "auto",
    **options: Any,
) -> Ends:
    """The bridge between these engines and a real trainer in this process. `model` is the run's, `trainers` what the
    trainer opens; `end` is another extension for the engines. Raises what `connect` raises."""
    model = model or served[0].model
    trainer = GrpoTrainer(
        GrpoOptions(learning_rate=1e-2, max_grad_norm=10.0, dtype=dtype),
        RunContext(directory, trainers or model, transport=transports[0], threads=1),
    )
    info = await trainer.open()
    trainer.endpoint = LocalEndpoint(trainer)
    bridge = IpcBridge(IpcOptions(**options), RunContext(directory, model, transports=transports))
    extensions = bridge.extensions()
    await trainer.endpoint.load_extension(extensions["trainer"])
    for one in served:
        await one.engine.endpoint.load_extension(f"tests.vllm.faults_ipc:{end}" if end else extensions["engine"])
    try:
        await bridge.connect(trainer.endpoint, [one.engine for one in served])
    except BaseException:
        await bridge.close()
        raise
    parts: Any = SimpleNamespace(engine=served[0].engine, trainer=trainer, bridge=bridge)
    draw = np.random.default_rng(3)
    prompts = [draw.integers(3, info.vocabulary - 3, size=6 + 5 * i).astype(np.int32) for i in range(2)]
    return Ends(None, parts, info, prompts)  # type: ignore[arg-type] # there is no plan


# -- planted faults; the servers are still as they were loaded


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("tensor_missing", f"trainer's model has '{TENSOR}' .* engine's has no such tensor"),
        ("transposed", f"'{TENSOR}': stride differs"),
        ("gate_and_up_swapped", r"'model.layers.0.mlp.(gate|up)_proj.weight': the engine's values are not those of the model"),
        ("out_of_bounds", f"'{TENSOR}' at bytes .* ends outside the segment"),
        ("stale_file", "stale handle file .*engine0.rank0.json: it was written by an earlier run"),
        ("dead_owner", "dead owner of handle file .*there is no process"),
        ("foreign_nonce", "foreign nonce in handle file"),
        ("readable_by_others", "has mode 0644"),
        ("silent", "there is no handle file .*the process that should have written it did not"),
        ("other_owner", r"cannot open /proc/|is not the segment \[\d+, \d+\] that handle file"),
    ],
)  # fmt: skip
async def test_a_fault_in_what_the_worker_says_is_named(
    served: list[Hosted], tmp_path: Path, fault: str, message: str
) -> None:
    with pytest.raises(WeightsMismatch, match=message):
        await connect(served[:1], tmp_path, "posix_shm", end=fault)
    assert not (tmp_path / "ipc").exists()


def changed(model: Path, into: Path, **changes: Any) -> Path:
    """A copy of a model directory, with another config.json."""
    shutil.copytree(model, into)
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**config, **changes}))
    return into


async def test_another_dtype_is_named(served: list[Hosted], tmp_path: Path) -> None:
    with pytest.raises(WeightsMismatch, match=r"dtype differs\.\n  trainer: bfloat16 .*\n  engine:  float32"):
        await connect(served[:1], tmp_path, "posix_shm", dtype="bfloat16")


async def test_another_rotary_base_is_named_with_both_values(served: list[Hosted], tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10100.0}
    other = changed(served[0].model, tmp_path / "other", rope_parameters=rope)
    with pytest.raises(
        WeightsMismatch,
        match=r"rotary positions of 'model.layers.0.self_attn.rotary_emb' differ: at position \d+.* in the trainer and .* in the engine",
    ) as found:
        await connect(served[:1], tmp_path, "posix_shm", trainers=other)
    assert "10100.0" in str(found.value) and "10000.0" in str(found.value)


async def test_an_untied_embedding_is_named(served: list[Hosted], tmp_path: Path) -> None:
    other = changed(served[0].model, tmp_path / "other", tie_word_embeddings=False)
    with pytest.raises(
        WeightsMismatch, match="tied otherwise: the trainer's model has .* by itself, the engine's has one"
    ):
        await connect(served[:1], tmp_path, "posix_shm", trainers=other)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (1, r"vLLM's Qwen2ForCausalLM has 'model.layers.1.* of which parameters of the trainer's model cover 0 of"),
        (3, r"trainer's model has 'model.layers.2.* vLLM's Qwen2ForCausalLM has no such parameter"),
    ],
)
async def test_another_depth_is_named(served: list[Hosted], tmp_path: Path, layers: int, message: str) -> None:
    other = changed(
        served[0].model, tmp_path / "other", num_hidden_layers=layers, layer_types=["full_attention"] * layers
    )
    with pytest.raises(WeightsMismatch, match=message):
        await connect(served[:1], tmp_path, "posix_shm", trainers=other)


async def test_a_matrix_that_is_stored_transposed_is_named(served: list[Hosted], tmp_path: Path) -> None:
    other = shutil.copytree(served[0].model, tmp_path / "other")
    with (other / "model.safetensors").open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(size))[TENSOR]
        first, end = (8 + size + offset for offset in entry["data_offsets"])
        file.seek(first)
        matrix = np.frombuffer(file.read(end - first), np.float32).reshape(entry["shape"])
        file.seek(first)
        file.write(matrix.T.tobytes())
    with pytest.raises(WeightsMismatch, match=f"'{TENSOR}': the engine's values .* It is transposed"):
        await connect(served[:1], tmp_path, "posix_shm", model=other)


async def test_another_model_is_named(served: list[Hosted], models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(WeightsMismatch, match="handle file .* is of another model"):
        await connect(served[:1], tmp_path, "posix_shm", model=models["qwen3"])


# -- publishing


async def test_one_engine_shares_and_one_copies_and_both_sample_from_what_was_trained(
    served: list[Hosted], tmp_path: Path
) -> None:
    ends = await connect(served, tmp_path, "posix_shm", "copy")
    weights = sum(parameter.nbytes for parameter in ends.parts.trainer.model.parameters())  # type: ignore[attr-defined]
    [first] = await ends.sample(ends.prompts[0], SAMPLING)
    probe = np.concatenate([ends.prompts[0], first.tokens])
    [before] = await ends.parts.trainer.logprobs([probe])
    for _ in range(5):
        await ends.update(SAMPLING)
        for one in served:
            ends.parts.engine = one.engine
            assert await ends.difference(SAMPLING) <= BOUND
            [scored] = await one.engine.logprobs([probe])
            [expected] = await ends.parts.trainer.logprobs([probe])
            assert np.abs(scored - expected).max() <= BOUND
        assert ends.parts.bridge.published is not None
        assert (
            ends.parts.bridge.published.bytes_copied == 2 * weights
        )  # into host memory, and from there into one engine
    [after] = await ends.parts.trainer.logprobs([probe])
    assert np.abs(after - before).max() > 0.5
    mapped = [shared_memory(os.getpid()), *(shared_memory(one.processes["worker"].pid) for one in served)]
    assert mapped[0] & mapped[1] and mapped[0] & mapped[2] and not mapped[1] & mapped[2]
    await ends.parts.bridge.close()
    assert not list(tmp_path.iterdir())


def shared_memory(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:atropos-weights" in line}


async def test_weights_that_have_moved_on_since_they_were_loaded_are_refused(
    served: list[Hosted], tmp_path: Path
) -> None:
    with pytest.raises(WeightsMismatch, match="the engine's values are not those of the model directory"):
        await connect(served[:1], tmp_path, "posix_shm")


async def test_weights_that_cannot_be_shared_are_copied_and_one_line_says_so(
    served: list[Hosted], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FitError, match=r"copies = false.*: its weights are planted"):
        await connect(served[:1], tmp_path, "posix_shm", end="unshareable", copies=False)
    ends = await connect(served[:1], tmp_path, "posix_shm", end="unshareable")
    assert (
        "copies weights at each publish, because they cannot be shared: its weights are planted"
        in capsys.readouterr().err
    )
    ends.version = 10
    await ends.update(SAMPLING)
    assert await ends.difference(SAMPLING) <= BOUND
    assert ends.parts.bridge.published is not None and ends.parts.bridge.published.bytes_copied > 0
    await ends.parts.bridge.close()


async def test_a_publish_that_loads_nothing_is_named_and_leaves_the_engine_paused(
    served: list[Hosted], tmp_path: Path
) -> None:
    ends = await connect(served[1:], tmp_path, "copy", end="skips_publish")
    with pytest.raises(WeightsMismatch, match="the publish was skipped"):
        async with ends.parts.bridge.writing(20):
            pass
    waiting = asyncio.ensure_future(ends.sample(ends.prompts[0], SAMPLING))
    await asyncio.sleep(0.5)
    assert not waiting.done() and ends.parts.bridge.published is None
    waiting.cancel()
    await ends.parts.bridge.close()


async def test_a_vllm_that_lacks_a_name_or_is_another_version_is_refused_by_name() -> None:
    ended = subprocess.run([sys.executable, "-c", LACKING], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    missing, other = ended.stdout.splitlines()[-2:]
    assert (
        "has no vllm.model_executor.model_loader.reload:finalize_layerwise_reload, which bridge 'ipc' needs" in missing
    )
    assert "this is vLLM 0.99.0" in other


LACKING = """
import os, vllm
from vllm.model_executor.model_loader import reload
from atropos_bridge_ipc.vllm import entry
from atropos_core.errors import FitError
os.environ[entry.TRANSFER_VARIABLE] = entry.NAME
kept = reload.finalize_layerwise_reload
del reload.finalize_layerwise_reload
for version in (vllm.__version__, "0.99.0"):
    vllm.__version__ = version
    try:
        entry.register()
    except FitError as error:
        print(str(error).splitlines()[0])
"""


async def test_vllms_rotary_tables_are_those_of_transformers_for_each_kind_of_scaling() -> None:
    ended = subprocess.run([sys.executable, "-c", TABLES], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "default theta linear llama3 yarn partial"


TABLES = """
import torch
from types import SimpleNamespace
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from atropos_bridge_ipc import rotary
from atropos_bridge_ipc.vllm import angles, names
from plugins.bridge_ipc.tests.test_rotary import HEAD, KINDS, LENGTH, model

config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=LENGTH, hf_config=None))
passed = []
for kind, rope in KINDS.items():
    for dtype in (torch.float32, torch.bfloat16):
        with set_current_vllm_config(VllmConfig()):
            theirs = torch.nn.ModuleDict({"model": get_rope(HEAD, LENGTH, True, dict(rope), dtype)})
        tables = angles.tables(theirs, config, names.find())
        assert [table["layers"] for table in tables] == [["model"]]
        rotary.check(model(kind), tables)
    passed.append(kind)
print(*passed)
"""

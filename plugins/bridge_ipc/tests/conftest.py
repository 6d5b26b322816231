"""A tiny model directory, holders of a model, and both ends of a bridge in separate processes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from atropos_bridge_ipc.bridge import IpcBridge
from atropos_bridge_ipc.config import IpcOptions
from atropos_core.plugins.provider import RunContext
from atropos_core.processes.child import Child
from atropos_core.processes.endpoints import PeerEndpoint
from atropos_core.processes.proxies import HostedEngine

HOLDER = "plugins.bridge_ipc.tests.holder_process"


def make_model(directory: Path, *, dtype: str = "float32", **changes: Any) -> Path:
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, eos_token_id=2, pad_token_id=0,
        bos_token_id=None, tie_word_embeddings=True,
    ) | changes  # fmt: skip
    model = Qwen3ForCausalLM(Qwen3Config(**shape)).to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    words = {"<unk>": 1} | {f"w{i}": i for i in range(2, 64)}
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w2"}))
    return directory


class Holder:
    """The part of an engine or a trainer that an extension uses."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.moved = 0

    def weights_moved(self) -> None:
        self.moved += 1


def loaded(directory: Path) -> Holder:
    return Holder(AutoModelForCausalLM.from_pretrained(directory))


def skeleton(directory: Path, **changes: Any) -> Holder:
    config = AutoConfig.from_pretrained(directory)
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.device("meta"):
        return Holder(AutoModelForCausalLM.from_config(config))


@pytest.fixture(scope="session", name="make_model")
def make_model_fixture() -> Callable[..., Path]:
    return make_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def holders() -> SimpleNamespace:
    return SimpleNamespace(loaded=loaded, skeleton=skeleton, of=Holder)


@pytest.fixture
async def connected(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Start engine "hf" and a fake trainer in two processes, and lay the bridge between them."""
    children: list[Child] = []

    async def connect(model: Path) -> SimpleNamespace:
        context = {
            "directory": tmp_path, "model": model, "seed": 0, "deterministic": True, "transport": "posix_shm",
            "devices": ("cpu",), "threads": 1,
        }  # fmt: skip
        build = {"kind": "engine", "name": "hf", "options": {}, "context": context}
        children.append(await Child.start("engine", build, tmp_path / "engine.log", threads=1))
        engine = HostedEngine(children[-1])
        log = tmp_path / "trainer.log"
        children.append(await Child.start("trainer", {"model": str(model)}, log, program=HOLDER, threads=1))
        trainer = PeerEndpoint(children[-1].peer)
        await engine.open()
        bridge = IpcBridge(IpcOptions(), RunContext(tmp_path, model, transport="posix_shm"))
        extensions = bridge.extensions()
        await engine.endpoint.load_extension(extensions["engine"])
        await trainer.load_extension(extensions["trainer"])
        await bridge.connect(trainer, [engine])
        return SimpleNamespace(engine=engine, trainer=trainer, bridge=bridge, children=children[-2:])

    yield connect
    for child in children:
        await child.close()

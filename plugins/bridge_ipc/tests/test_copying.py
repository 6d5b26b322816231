"""Copying, when weights cannot be shared, or not with every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from atropos_bridge_ipc import plugin
from atropos_bridge_ipc.bridge import IpcBridge
from atropos_bridge_ipc.config import IpcOptions
from atropos_core.errors import FitError
from atropos_core.plugins.provider import RunContext
from atropos_core.processes.endpoints import LocalEndpoint
from plugins.bridge_ipc.tests.servers import Server


async def connect(
    model: Path, directory: Path, trainer: Any, engines: list[Any], *transports: Any, **options: Any
) -> IpcBridge:
    bridge = IpcBridge(
        IpcOptions(**options), RunContext(directory, model, transport=transports[0], transports=transports)
    )
    extensions = bridge.extensions()
    endpoint = LocalEndpoint(trainer)
    await endpoint.load_extension(extensions["trainer"])
    for engine in engines:
        await engine.endpoint.load_extension(extensions["engine"])
    await bridge.connect(endpoint, engines)
    return bridge


def hosted(holder: Any) -> Any:
    """As an engine with its model in its own process."""
    holder.endpoint = LocalEndpoint(holder)

    async def nothing(*arguments: Any) -> None: ...

    holder.pause = holder.resume = nothing
    return holder


async def test_a_trainer_that_was_to_share_loads_its_own_weights_and_every_publish_copies_them(
    tiny: Path, tmp_path: Path, holders: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, server = holders.skeleton(tiny), Server(tiny)
    bridge = await connect(tiny, tmp_path, trainer, [server], "posix_shm")
    line = "copies weights at each publish, because they cannot be shared: its experts are fused"
    assert line in capsys.readouterr().err
    original = holders.loaded(tiny).model
    for name, parameter in original.named_parameters():
        assert torch.equal(trainer.model.get_parameter(name), parameter), name
    assert trainer.model.lm_head.weight is trainer.model.model.embed_tokens.weight and trainer.moved == 1
    assert torch.equal(trainer.model.model.rotary_emb.inv_freq, original.model.rotary_emb.inv_freq)

    server.calls.clear()
    async with bridge.writing(3):
        assert server.calls == ["pause"]
        with torch.no_grad():
            trainer.model.model.norm.weight.mul_(2)
    assert server.calls == ["pause", "start", "update", "finish", 3]
    assert torch.equal(server.weights["model.norm.weight"], original.model.norm.weight * 2)
    whole = sum(parameter.nbytes for parameter in original.parameters())
    assert bridge.published is not None and bridge.published.bytes_copied == 2 * whole
    await bridge.close()
    assert not (tmp_path / "ipc").exists()


async def test_the_first_engine_shares_and_a_second_one_copies(tiny: Path, tmp_path: Path, holders: Any) -> None:
    first, second, trainer = hosted(holders.loaded(tiny)), Server(tiny), holders.skeleton(tiny)
    bridge = await connect(tiny, tmp_path, trainer, [first, second], "posix_shm", "copy")
    async with bridge.writing(1):
        with torch.no_grad():
            trainer.model.model.norm.weight.fill_(3.0)
    assert torch.equal(first.model.model.norm.weight, torch.full((32,), 3.0))
    assert torch.equal(second.weights["model.norm.weight"], torch.full((32,), 3.0))


async def test_an_exception_while_writing_copies_nothing_and_resumes_no_engine(
    tiny: Path, tmp_path: Path, holders: Any
) -> None:
    server = Server(tiny)
    bridge = await connect(tiny, tmp_path, holders.loaded(tiny), [server], "copy")
    server.calls.clear()
    with pytest.raises(ZeroDivisionError):
        async with bridge.writing(1):
            raise ZeroDivisionError
    assert server.calls == ["pause"] and bridge.published is None


async def test_engines_that_can_neither_share_nor_copy_are_refused(tiny: Path, tmp_path: Path, holders: Any) -> None:
    with pytest.raises(FitError, match="engine 1 can only share the weights") as found:
        engines = [hosted(holders.loaded(tiny)), hosted(holders.loaded(tiny))]
        await connect(tiny, tmp_path, holders.skeleton(tiny), engines, "posix_shm", "copy")
    assert "Run one engine" in (found.value.remedy or "")
    with pytest.raises(FitError, match=r"copies = false.* cannot share its weights: its experts are fused\."):
        await connect(tiny, tmp_path, holders.skeleton(tiny), [Server(tiny)], "posix_shm", copies=False)


def test_the_option_decides_what_the_bridge_carries() -> None:
    both = {"posix_shm", "cuda_ipc"}
    assert plugin.transports(IpcOptions()) == both | {"copy"}
    assert plugin.transports(IpcOptions(copies=True)) == {"copy"}
    assert plugin.transports(IpcOptions(copies=False)) == both


async def test_what_a_killed_run_left_is_swept(tiny: Path, tmp_path: Path, holders: Any) -> None:
    left = tmp_path / "ipc" / "engine7.rank0.json"
    left.parent.mkdir()
    left.write_text('{"format": 1, "owner": {"pid": 4194999, "started": 1}, "nonce": "", "model": "", "content": {}}')
    left.chmod(0o600)
    bridge = await connect(tiny, tmp_path, holders.loaded(tiny), [Server(tiny)], "copy")
    names = {path.name for path in left.parent.iterdir()}
    assert names == {"trainer.json", "engine0.rank0.json"}
    await bridge.close()
    await bridge.close()

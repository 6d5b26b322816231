"""Named adapters: what is refused before and after the server has read one, and the rows that an adapter is added to."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.numpy import save_file

from atropos_core.errors import ConfigError, DataError, FitError
from atropos_engine_vllm import adapters, command
from atropos_engine_vllm.adapter_worker import LEFT_OUT, OPEN, add_adapters, prompt_logprobs
from atropos_engine_vllm.adapters import Adapters, Loaded
from atropos_engine_vllm.engine import VLLMEngine
from atropos_engine_vllm.named_adapters import NamedAdapters, read_adapter

HIDDEN, WORDS = 8, 64
Q = "model.layers.0.self_attn.q_proj"


class Server:
    """Answers what the engine asks of a vLLM server about adapters, and keeps which ones it holds."""

    def __init__(self, *, head: bool = True, left_out: tuple[str, ...] = ()) -> None:
        self.head = head
        self.left_out = left_out
        self.held: dict[str, int] = {}
        self.numbers = 0

    async def post(self, path: str, body: dict[str, Any], **_: Any) -> Any:
        await asyncio.sleep(0)
        if path == "/v1/load_lora_adapter":
            self.numbers += 1
            self.held[body["lora_name"]] = self.numbers
        elif path == "/v1/unload_lora_adapter":
            del self.held[body["lora_name"]]
        elif body["method"] == "list_loras":
            return {"results": [str(set(self.held.values()))]}
        elif body["method"] == OPEN:
            return {"results": [{"head": self.head, "head_scores": False}]}
        elif body["method"] == LEFT_OUT:
            return {"results": [list(self.left_out)]}
        return {}


@pytest.fixture
def base(model: Path) -> Path:
    """The model directory with weights of one layer, whose head is tied."""
    config = json.loads((model / "config.json").read_text())
    shape = {"num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1, "tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(config | shape))
    weights = {f"{Q}.weight": np.zeros((12, HIDDEN), np.float32)}
    save_file(
        weights | {"model.embed_tokens.weight": np.zeros((WORDS, HIDDEN), np.float32)}, model / "model.safetensors"
    )
    return model


def written(directory: Path, shapes: dict[str, tuple[int, int]], rank: int = 4, **config: Any) -> Path:
    """An adapter with layers of these [outputs, inputs]."""
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": 8} | config))
    tensors = {}
    for layer, (outputs, inputs) in shapes.items():
        tensors[f"base_model.model.{layer}.lora_A.weight"] = np.zeros((rank, inputs), np.float32)
        tensors[f"base_model.model.{layer}.lora_B.weight"] = np.zeros((outputs, rank), np.float32)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


async def opened(server: Any, base: Path, *, most: int = 2) -> NamedAdapters:
    held = Adapters(server, most, drain_s=5.0, taken=())
    named = NamedAdapters(server, held, base, 4, "Raise engine.max_lora_rank.")
    await named.open()
    return named


async def test_an_adapter_is_read_once_and_unloaded_when_it_is_removed(base: Path, tmp_path: Path) -> None:
    server = Server()
    named = await opened(server, base)
    for at, shapes in enumerate(({Q: (12, HIDDEN)}, {"lm_head": (WORDS, HIDDEN)})):
        await named.add(written(tmp_path / f"{at}", shapes), f"a/{at}")
    assert len(server.held) == 2 and not any("/" in name for name in server.held)
    with pytest.raises(
        DataError, match=r"'third' has no room: the vLLM server holds 2 adapters already.\n.*max_cpu_loras"
    ):
        await named.add(tmp_path / "0", "third")
    with pytest.raises(DataError, match="already has an adapter 'a/0'"):
        await named.add(tmp_path / "0", "a/0")
    with pytest.raises(DataError, match="needs a name"):
        await named.add(tmp_path / "0", "")
    first = set(server.held)
    await named.remove("a/0")
    with pytest.raises(DataError, match="no adapter 'a/0'. Its adapters: 'a/1'"):
        await named.remove("a/0")
    await named.add(tmp_path / "0", "a/0")
    assert len(server.held) == 2 and len(first & set(server.held)) == 1, "never a name that the server has had"
    assert named.of(None) is None and named.of("a/0") is not named.of("a/1")


async def test_an_adapter_in_use_stays_until_its_last_request_has_ended(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "ABORT_S", 0.0)
    server = Server()
    named = await opened(server, base)
    await named.add(written(tmp_path / "a", {Q: (12, HIDDEN)}), "a")
    async with named.using(named.of("a")):
        removing = asyncio.ensure_future(named.remove("a"))
        for _ in range(50):
            await asyncio.sleep(0)
        assert server.held and not removing.done()
    await removing
    assert not server.held


async def test_an_adapter_that_vllm_cannot_apply_as_a_whole_is_refused(base: Path, tmp_path: Path) -> None:
    fits = {Q: (12, HIDDEN)}
    head = {"lm_head": (WORDS, HIDDEN)}
    cases: list[tuple[Server, str, dict[str, Any], str]] = [
        (Server(), "rank", {"shapes": fits, "rank": 5}, r"has rank 5, .* rank 4 at most.\n  Raise engine.max_lora_rank"),
        (Server(), "pattern", {"shapes": fits, "rank_pattern": {"q_proj": 9}}, "has rank 9"),
        (Server(head=False), "head", {"shapes": head}, r"changes the head, (?s:.*)train_unembed=False"),
        (Server(), "words", {"shapes": {"lm_head": (WORDS - 1, HIDDEN)}}, r"'lm_head' is \[63, 8\] there, and \[64, 8\]"),
        (Server(), "small", {"shapes": {Q: (11, HIDDEN)}}, rf"'{Q}' is \[11, 8\] there, and \[12, 8\] in the model"),
        (Server(left_out=("model.layers.7.q",)), "deep", {"shapes": fits}, r"leave out 1 layers of .*'model.layers.7.q'"),
    ]  # fmt: skip
    for server, name, adapter, why in cases:
        named = await opened(server, base)
        with pytest.raises(DataError, match=why):
            await named.add(written(tmp_path / name, **adapter), name)
        assert not server.held
        with pytest.raises(DataError, match=f"no adapter '{name}'"):
            named.of(name)
    for number, damage in enumerate(("{}", "[", '{"r": "x"}', '{"r": [1]}')):
        broken = written(tmp_path / f"damage{number}", fits)
        (broken / "adapter_config.json").write_text(damage)
        with pytest.raises(DataError, match="cannot read an adapter from"):
            read_adapter(broken)
    broken = written(tmp_path / "cut", fits)
    (broken / "adapter_model.safetensors").write_bytes(b"\xff" * 8)
    with pytest.raises(DataError, match="cannot read an adapter from"):
        read_adapter(broken)


async def test_a_server_that_would_score_with_the_wrong_rows_of_the_head_does_not_score(
    base: Path, tmp_path: Path
) -> None:
    named = await opened(Server(), base)
    await named.add(written(tmp_path / "head", {"lm_head": (WORDS, HIDDEN)}), "head")
    await named.add(written(tmp_path / "plain", {Q: (12, HIDDEN)}), "plain")
    assert named.of("plain", scores=True) is not None and named.of("head") is not None
    with pytest.raises(NotImplementedError, match="does not score prompts with an adapter of the head, and 'head' has"):
        named.of("head", scores=True)


def test_the_options_of_adapters_become_flags(options: Any, context: Any) -> None:
    def flags(named: int = 3, **given: Any) -> dict[str, str]:
        where = context(announced={"named_adapters": named}, transport="adapter", label="engine")
        made = command.flags(options(**given), where, "float32")
        return {flag: value for flag, value in zip(made, [*made[1:], ""], strict=True) if "lora" in flag}

    usual = {"--enable-lora": "--max-loras", "--max-loras": "4", "--max-lora-rank": "32", "--max-cpu-loras": "12"}
    assert flags() == usual
    assert flags(named=1, max_loras=6)["--max-cpu-loras"] == "6"
    changed = flags(max_loras=2, max_cpu_loras=5, max_lora_rank=33)
    assert (changed["--max-cpu-loras"], changed["--max-lora-rank"]) == ("5", "64"), "the next rank with kernels"
    with pytest.raises(ConfigError, match="enforce_eager = false does not work with named adapters on a CPU"):
        flags(enforce_eager=False)
    with pytest.raises(ValidationError, match="max_cpu_loras = 3 is less than max_loras = 4"):
        options(max_cpu_loras=3)
    trainers = context(announced={"lora": {"rank": 5}}, transport="adapter", label="engine")
    assert "16" in command.flags(options(), trainers, "float32")
    with pytest.raises(ConfigError, match="engine.max_lora_rank has no effect: .* whose rank is trainer.lora.rank"):
        command.flags(options(max_lora_rank=8), trainers, "float32")
    for name in ("max_cpu_loras", "max_lora_rank"):
        with pytest.raises(ConfigError, match=f"engine.{name} has no effect: this engine receives no adapters"):
            command.flags(options(**{name: 9}), context(label="engine"), "float32")


async def test_an_engine_that_cannot_have_named_adapters_says_why(
    options: Any, context: Any, model: Path, tmp_path: Path
) -> None:
    attached = options(url="http://127.0.0.1:1")
    announced = {"announced": {"named_adapters": 4}, "transport": "adapter"}
    without = VLLMEngine(attached, context())
    for call in (without.add_adapter(tmp_path, "a"), without.remove_adapter("a"), without.logprobs_with("a", [])):
        with pytest.raises(NotImplementedError, match="without room for named adapters"):
            await call
    adapter = written(tmp_path / "adapter", {Q: (12, HIDDEN)}, base_model_name_or_path=str(model))
    with pytest.raises(FitError, match="adds no adapters over it"):
        VLLMEngine(attached, replace(context(**announced), model=adapter))
    with pytest.raises(FitError, match="deterministic = true"):
        VLLMEngine(attached, context(**announced, deterministic=True))


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_each_row_gets_the_output_of_its_own_adapter_or_none(scale: float) -> None:
    """By the definition, row by row in float64."""
    made = torch.Generator().manual_seed(0)
    widths, rank, inputs, slots = (5, 3), 2, 7, torch.tensor([1, -1, 2, 1, 0, -1, 2, 2])
    x, y = torch.randn(6, inputs, generator=made), torch.randn(6, sum(widths), generator=made)
    a = [torch.randn(3, 1, rank, inputs, generator=made) for _ in widths]
    b = [torch.randn(3, 1, width, rank, generator=made) for width in widths]
    expected = y.double().numpy()
    for row, slot in enumerate(slots[: len(x)].tolist()):
        if slot >= 0:
            parts = [
                up[slot, 0].double() @ (down[slot, 0].double() @ x[row].double()) for down, up in zip(a, b, strict=True)
            ]
            expected[row] += scale * torch.cat(parts).numpy()
    add_adapters(y, x, a, b, slots, scale, widths)
    np.testing.assert_allclose(y.numpy(), expected, atol=1e-5)
    padded, before = torch.zeros(6, 4), torch.zeros(6, 4)
    add_adapters(padded, x, a[:1], b[:1], torch.full((6,), -1), scale, [4])
    np.testing.assert_array_equal(padded, before)
    add_adapters(padded, x, a[:1], b[:1], torch.full((6,), 2), scale, [4])
    np.testing.assert_allclose(padded[0], scale * (b[0][2, 0] @ (a[0][2, 0] @ x[0]))[:4], atol=1e-5)


@dataclass(frozen=True)
class Adapter:
    """The part of vLLM's LoRARequest that the worker reads."""

    lora_int_id: int


def test_each_row_of_a_scored_prompt_has_the_adapter_of_its_request() -> None:
    """The first prompt is scored in two parts, the second has no adapter, and the third is not scheduled."""
    one, other = Adapter(7), Adapter(3)

    def request(length: int, adapter: Any, computed: int = 0) -> Any:
        return SimpleNamespace(prompt_token_ids=[5] * length, lora_request=adapter, num_computed_tokens=computed)

    class Runner:
        def __init__(self) -> None:
            self.num_prompt_logprobs = {"parts": 0, "base": 2, "later": 1}
            self.requests = {"parts": request(10, one), "base": request(4, None), "later": request(5, other)}
            self.mapping: tuple[int, ...] = ()
            self.active: set[Any] = set()

        def _set_active_loras(self, rows: tuple[int, ...], tokens: tuple[int, ...], active: set[Any]) -> None:
            assert rows == tokens
            self.mapping, self.active = rows, {adapter.lora_int_id for adapter in active}

    seen: list[Any] = []

    def own(runner: Any, hidden: Any, scheduled: Any) -> dict[str, Any]:
        """As vLLM's: it scores what waits, and forgets those that it has finished."""
        [name] = runner.num_prompt_logprobs
        seen.append((name, runner.num_prompt_logprobs[name], runner.mapping, runner.active))
        state = runner.requests[name]
        if state.num_computed_tokens + scheduled[name] < len(state.prompt_token_ids):
            return {}
        del runner.num_prompt_logprobs[name]
        return {name: "scored"}

    runner = Runner()
    assert prompt_logprobs(runner, own, None, {"parts": 6, "base": 4, "elsewhere": 1}) == {"base": "scored"}
    assert seen == [("parts", 0, (7,) * 6, {7}), ("base", 2, (0,) * 3, set())]
    assert runner.num_prompt_logprobs == {"parts": 0, "later": 1}
    runner.requests["parts"].num_computed_tokens = 6
    assert prompt_logprobs(runner, own, None, {"parts": 4, "later": 5}) == {"parts": "scored", "later": "scored"}
    assert seen[2:] == [("parts", 0, (7,) * 3, {7}), ("later", 1, (3,) * 4, {3})]
    assert not runner.num_prompt_logprobs


async def test_an_adapter_stays_while_it_is_checked(base: Path, tmp_path: Path) -> None:
    server = Server()
    held = Adapters(server, 2, drain_s=5.0, taken=())

    async def check(loaded: Loaded) -> None:
        for one in ("first",) if len(server.held) == 2 else ():
            async with held.using(held.of(one)):  # its end has unused adapters looked for
                pass
        await asyncio.sleep(0.01)
        assert loaded.name in server.held

    for name in ("first", "second"):
        await held.add(written(tmp_path / name, {Q: (12, HIDDEN)}), name, check)
    assert len(server.held) == 2
    await held.close(unload=False)

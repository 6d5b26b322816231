"""Tiny random models, and batches for them."""

import resource
import shutil
from collections.abc import Callable
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from atropos_core.plugins.provider import RunContext
from atropos_core.types import Batch
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.layouts import Layout
from atropos_trainer_grpo.losses import LOSSES
from atropos_trainer_grpo.model import open_model
from atropos_trainer_grpo.optimizer import Optimizer
from atropos_trainer_grpo.stepwise.trainer import StepwiseGrpoTrainer
from atropos_trainer_grpo.trainer import GrpoTrainer
from atropos_trainer_grpo.update import Update

VOCABULARY = 37

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.3,  # distributions that are far from flat
}


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_of(tmp_path_factory, share_directory) -> Callable[..., Path]:
    """A model directory that tests share: `model_of("qwen3", tied=True, dtype=torch.float32)`. Change a copy of it."""
    made: dict[tuple, Path] = {}

    def make(kind: str = "qwen3", tied: bool = True, dtype: torch.dtype = torch.float32) -> Path:
        if (kind, tied, dtype) not in made:
            directory = tmp_path_factory.mktemp(kind)
            torch.manual_seed(7)
            if kind == "qwen3":
                model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=tied))
            elif kind == "qwen3_moe":
                experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
                model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **experts, head_dim=8, tie_word_embeddings=tied))
            else:
                model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
            model.to(dtype).save_pretrained(directory)
            words = {"<pad>": 0, "<end>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
            tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
            tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
            fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
            fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
            fast.save_pretrained(directory)
            made[kind, tied, dtype] = share_directory(directory)
        return made[kind, tied, dtype]

    return make


@pytest.fixture(scope="session")
def large_model(model_of, tmp_path_factory) -> Path:
    """Of 4 M parameters: no gradient, and no moment of Adam's, fits into what an allocator may have left over."""
    directory = tmp_path_factory.mktemp("large")
    shutil.copytree(model_of(), directory, dirs_exist_ok=True)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"vocab_size": 125_000}, head_dim=8)).save_pretrained(directory)
    return directory


def refuse_memory_beyond(pid: int, more_bytes: int) -> None:
    """As `ulimit -v` does, from here on."""
    limit = psutil.Process(pid).memory_info().vms + more_bytes
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    """Groups of sequences with a common prompt; advantages are random, one per sequence."""

    def make(seed: int = 0, groups: int = 3, size: int = 4, version: int = 1) -> Batch:
        random = np.random.default_rng(seed)
        tokens, sampled, advantages = [], [], []
        for _ in range(groups):
            prompt = random.integers(2, VOCABULARY, random.integers(2, 9))
            for _ in range(size):
                reply = random.integers(2, VOCABULARY, random.integers(1, 30))
                tokens.append(np.concatenate([prompt, reply]))
                sampled.append(np.arange(len(tokens[-1])) >= len(prompt))
                advantages.append(np.where(sampled[-1], random.normal(), 0.0))
        mask = np.concatenate(sampled)
        sequences = groups * size
        return Batch(
            tokens=np.concatenate(tokens).astype(np.int32),
            offsets=np.cumsum([0, *map(len, tokens)]).astype(np.int64),
            sampled=mask,
            trained=mask.copy(),
            logprobs=np.where(mask, random.normal(-3.0, 0.5, len(mask)), 0).astype(np.float32),
            has_logprobs=np.ones(sequences, np.bool_),
            policy_version=np.full(len(mask), version - 1, np.int32),
            advantages=np.concatenate(advantages).astype(np.float32),
            temperature=np.ones(sequences, np.float32),
            truncated=np.zeros(sequences, np.bool_),
            group=np.repeat(np.arange(groups, dtype=np.int32), size),
            version=version,
        )

    return make


@pytest.fixture
def make_branches() -> Callable[..., Batch]:
    """Make groups of sequences that branch anywhere. Some end at a point at which another continues, and one occurs twice. Sampled and
    trained tokens, temperatures and advantages are random, also for shared tokens."""

    def make(seed: int = 0, groups: int = 3, size: int = 7) -> Batch:
        random = np.random.default_rng(seed)
        rows: list[np.ndarray] = []
        for _ in range(groups):
            members = [random.integers(2, VOCABULARY, random.integers(8, 40))]
            while len(members) < size - 2:
                before = members[random.integers(len(members))]
                kept = before[: random.integers(4, len(before) + 1)]
                members.append(np.concatenate([kept, random.integers(2, VOCABULARY, random.integers(1, 30))])[:120])
            longest = max(members, key=len)
            rows += [*members, longest[: len(longest) // 2], longest]
        lengths = [len(row) for row in rows]
        sequences, count = len(rows), sum(lengths)
        sampled = random.random(count) < 0.7
        trained = sampled & (random.random(count) < 0.8)
        return Batch(
            tokens=np.concatenate(rows).astype(np.int32),
            offsets=np.cumsum([0, *lengths]).astype(np.int64),
            sampled=sampled,
            trained=trained,
            logprobs=np.where(sampled, random.normal(-3.0, 0.5, count), 0).astype(np.float32),
            has_logprobs=np.ones(sequences, np.bool_),
            policy_version=np.zeros(count, np.int32),
            advantages=(np.repeat(random.normal(size=sequences), lengths) * trained).astype(np.float32),
            temperature=random.choice([0.7, 1.0], sequences).astype(np.float32),
            truncated=np.zeros(sequences, np.bool_),
            group=np.repeat(np.arange(groups, dtype=np.int32), size),
            version=1,
        )

    return make


def doubled(model):
    """In float64 throughout: transformers' norms would compute in float32 still."""

    def norm(module):
        def forward(states):
            return (
                module.weight * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + module.variance_epsilon)
            )

        return forward

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm(module)
    return model.double()


@pytest.fixture
def gradient(model_of):
    """`gradient(batch, **options)`: the loss and the flat gradient of one minibatch. KL is taken to another model. With
    `double`, the model computes in float64."""

    @contextmanager
    def reference():
        yield open_model(model_of(tied=False), dtype="auto", device="cpu", with_weights=True)

    def compute(batch, double=False, kind="qwen3", own_logits=False, **options):
        options = GrpoOptions(**options)
        layout = Layout(options.layout if options.layout == "rows" else "packed", own_logits)
        model = open_model(
            model_of(kind), dtype="auto", device="cpu", with_weights=True, attention=options.attention, layout=layout
        )
        model = doubled(model) if double else model
        optimizer = Optimizer(model.named_parameters(), options)
        loss = LOSSES[options.loss].having(**options.loss_values)
        update = Update(model, optimizer, options, loss, batch, "cpu", 0, (), reference)
        (chosen,) = update.minibatches()
        update.backward(chosen)
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        return update.tally.losses[0], torch.cat([part.flatten() for part in flat])

    return compute


class Gate:
    """Stands for a bridge: counts how often `writing` was entered, and what left it."""

    def __init__(self) -> None:
        self.entered = 0
        self.failed: list[type[BaseException]] = []

    @asynccontextmanager
    async def __call__(self):
        self.entered += 1
        try:
            yield
        except BaseException as error:
            self.failed.append(type(error))
            raise


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
async def open_trainer(model_of, tmp_path):
    """`await open_trainer(model, learning_rate=...)`: an open trainer in this process, closed at the end. `run`: more of its
    RunContext."""
    opened: list[GrpoTrainer] = []

    async def make(
        model: Path | None = None,
        *,
        seed: int = 0,
        transport: str | None = "checkpoint",
        steps: int = 0,
        run=None,
        **options,
    ):
        options = {"learning_rate": 1e-2, **options}
        context = RunContext(
            tmp_path, model or model_of(), steps, seed=seed, transport=transport, threads=1, **run or {}
        )
        trainer = GrpoTrainer(GrpoOptions(**options), context)
        opened.append(trainer)
        await trainer.open()
        return trainer

    yield make
    for trainer in opened:
        await trainer.close()


@pytest.fixture
async def open_stepwise(model_of, tmp_path):
    """`await open_stepwise(model, **options)`: an open trainer with a frozen base, closed at the end."""
    opened = []

    async def make(model=None, **options):
        context = RunContext(tmp_path, model or model_of(), transport="adapter", threads=1, deterministic=True)
        trainer = StepwiseGrpoTrainer(GrpoOptions(**options), context)
        opened.append(trainer)
        await trainer.open()
        return trainer

    yield make
    for trainer in opened:
        await trainer.close()
    torch.use_deterministic_algorithms(False)

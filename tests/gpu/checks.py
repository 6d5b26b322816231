"""The checks. Each starts what it needs, enters its figures in a Report, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.errors import AtroposError, DeadlineExceeded, ProcessDied
from atropos_core.guards.deadlines import within
from atropos_core.types import Batch, Completion, Sampling, Tokens, tokens
from tests.gpu import head as at_head
from tests.gpu import models, vllm_checks
from tests.gpu.decoding import decoding
from tests.gpu.learning import learns
from tests.gpu.loop import loop
from tests.gpu.memory import Memory
from tests.gpu.pair import Pair, Setting, ids, started
from tests.gpu.publishing import publishes
from tests.gpu.report import Check, Report, gap, most
from tests.gpu.training import PUBLISHED, Work, measured, measured_trl
from tests.gpu.trees import compared
from tests.gpu.two_ranks import two_ranks

UPDATES = 5
UTILIZATION = 1.0  # of a plain product: more would be a wrong count
BOUND = {"float32": 1e-4, "bfloat16": 0.1}  # nats; a run stops at 1e-4 and 0.5 (training.max_logprob_diff)
KERNELS: dict[str, dict[str, Any]] = {
    "torch": {}, "compiled": {"compiled": True}, "liger": {"kernels": "liger"},
    "liger and compiled": {"kernels": "liger", "compiled": True},
}  # fmt: skip
KERNELS_S = 100  # of one measurement, with compiling
TRL_S = 240
UNSLOTH_S = 90  # it compiles what it trains, and once it had not ended after two minutes
LONG: dict[str, Any] = {"tokens": 65_536, "sequences": 1, "offloading": True, "warm": 0, "steps": 1}
NAMED = {"beside_gib": "contexts of this process and of the checks'", "predicted_gib": "`atropos plan` says"}
CONTEXT_BYTES = 64e6  # what a device may still count some time after a process has ended


async def updates(setting: Setting, report: Report, dtype: str) -> None:
    """Engine "hf" samples, trainer "grpo" updates in the engine's memory, and both give the same tokens the same
    logprobs."""
    with tempfile.TemporaryDirectory() as folder:
        models.make(models.SMALL, dtype, "cpu", Path(folder))
        async with started(setting, Path(folder), dtype, holder=False) as pair:
            await pair.open(holder=False)
            await pair.connect()
            addresses = await pair.ask_engine("addresses")
            random = np.random.default_rng(1)
            probe = [ids(random, models.VOCABULARY, 64)]
            before = await pair.trainer.logprobs(probe)
            worst: list[float] = []
            means: list[float] = []
            publishes: list[float] = []
            copied = 0
            for version in range(UPDATES + 1):
                prompts, made = await _sample(pair, version)
                _require(
                    all((c.policy_version == version).all() for c in made), f"tokens of another version: {version}"
                )
                sequences = [np.concatenate([prompt, c.tokens]) for prompt, c in zip(prompts, made, strict=True)]
                scored = await pair.trainer.logprobs(sequences)
                off = np.concatenate(
                    [np.abs(row[-len(c.tokens) :] - c.logprobs) for row, c in zip(scored, made, strict=True)]
                )
                worst.append(most(off))
                means.append(float(off.mean()))
                if version < UPDATES:
                    batch = _batch(prompts, made, version + 1, random)
                    await pair.trainer.step(batch, partial(pair.bridge.writing, version + 1))
                    published = pair.bridge.published
                    assert published is not None, "writing was entered"
                    publishes.append(published.seconds)
                    copied += published.bytes_copied
            after = await pair.trainer.logprobs(probe)
            ours = await pair.engine.logprobs(probe)
            report.at_most(f"{dtype}: largest logprob difference, after each update", max(worst), BOUND[dtype], "nats")
            report.note(f"{dtype}: mean logprob difference", statistics.mean(means), "nats")
            report.at_most(f"{dtype}: engine's probe against the trainer's", gap(ours, after), BOUND[dtype], "nats")
            report.at_least(f"{dtype}: the probe moved by", gap(after, before), 0.5, "nats")
            report.note(f"{dtype}: publish, slowest of {UPDATES}", max(publishes), "s")
            report.holds(f"{dtype}: nothing copied", copied == 0, f"{copied} bytes")
            report.holds(
                f"{dtype}: no parameter of the engine's moved", addresses == await pair.ask_engine("addresses")
            )


async def graphs(setting: Setting, report: Report) -> None:
    """A graph of the engine's forward pass, captured before a write of the trainer's, computes with what was written."""
    with tempfile.TemporaryDirectory() as folder:
        models.make(models.SMALL, "float32", "cpu", Path(folder))
        async with started(setting, Path(folder), "float32", holder=True) as pair:
            await pair.open(holder=True)
            await pair.connect()
            await pair.ask_engine("graph", 48)
            addresses = await pair.ask_engine("addresses")
            old = await pair.ask_engine("replay")
            report.at_most("replay against eager, before", most(old - await pair.ask_engine("eager")), 1e-4)
            for version in (1, 2):
                async with pair.bridge.writing(version):
                    await pair.scale(1.25)
                new, eager = await pair.ask_engine("replay"), await pair.ask_engine("eager")
                report.at_most(f"replay against eager, after write {version}", most(new - eager), 1e-4)
                report.at_least(f"replay against the one before write {version}", most(new - old), 1e-2)
                old = new
            report.holds("no parameter of the engine's moved", addresses == await pair.ask_engine("addresses"))


async def one_copy(setting: Setting, report: Report) -> None:
    """A large model's weights are on the device once, and a publish under load takes no time to speak of."""
    with tempfile.TemporaryDirectory() as folder:
        size = models.make(models.large(setting.parameters), "bfloat16", setting.device, Path(folder))
        report.note("weights", size / 1e9, "GB")
        async with started(setting, Path(folder), "bfloat16", holder=True) as pair:
            await pair.warm()
            memory = Memory(setting.device, pair.pids)
            bare = memory.used_bytes()
            with memory.watched():
                await pair.open(holder=True)
                loaded = memory.used_bytes()
                await pair.connect()
                await pair.scale(1.0)  # and touches every page
                shared = memory.used_bytes()
                await publishes(setting, pair, report)
            resident, added, highest = (
                (used - since) / size for used, since in ((shared, bare), (shared, loaded), (memory.peak_bytes, bare))
            )
            if setting.device == "cpu":  # transformers leaves the weights in the file until they move to the segment
                # Python's own memory counts beside a small model, and differs by 40 MB from run to run.
                slack = 150e6 / size
                report.note("what moving and attaching added", added, "copies")
            else:
                slack = 0.0
                report.at_most("what moving and attaching added", added, 0.05, "copies")
            report.at_most("resident once attached", resident, 1.1 + slack, "copies")
            report.at_most("highest, from loading to the last publish", highest, 1.25 + slack, "copies")


async def killed(setting: Setting, report: Report, victim: int) -> None:
    """kill -9 of one end: a named error, the other end's memory is as it was or reported as gone, and all of it is given
    back."""
    who, other = (("owner", "attached"), ("attached", "owner"))[victim]
    memory = Memory(setting.device)
    with tempfile.TemporaryDirectory() as folder:
        models.make(models.SMALL, "float32", "cpu", Path(folder))
        before = memory.used_bytes()
        async with started(setting, Path(folder), "float32", holder=True) as pair:
            memory.pids = pair.pids
            await pair.open(holder=True)
            await pair.connect()
            probe = [tokens(range(3, 60))]
            expected = await pair.engine.logprobs(probe)
            began = time.perf_counter()
            pair.children[victim].process.kill()
            message = await _error(pair.children[victim].peer.call("call_extension", "read_sentinel", 0, deadline_s=10))
            report.at_most(f"{who} killed: seconds to the error", time.perf_counter() - began, 10, "s")
            named_so = isinstance(message, ProcessDied) and "SIGKILL" in str(message)
            report.holds(f"{who} killed: the message", named_so, str(message).splitlines()[0])
            survivor = await _error(
                pair.children[1 - victim].peer.call("call_extension", "read_sentinel", 1, deadline_s=10)
            )
            if survivor is None and victim == 1:
                changed = gap(await pair.engine.logprobs(probe), expected)
                report.at_most("the owner continues: logprobs changed by", changed, 1e-5, "nats")
            report.holds(
                f"{who} killed: the {other} process",
                survivor is None or (victim == 0 and setting.device != "cpu" and isinstance(survivor, AtroposError)),
                "reads on" if survivor is None else str(survivor).splitlines()[0],
            )
        until = time.monotonic() + 10
        while memory.used_bytes() > before + CONTEXT_BYTES and time.monotonic() < until:
            await asyncio.sleep(0.05)
        report.at_most(f"{who} killed: memory not given back", (memory.used_bytes() - before) / 1e6, 64, "MB")
        gone = not any(Path(f"/proc/{pid}").exists() for pid in pair.pids)
        report.holds(f"{who} killed: no process left", gone)
    # Where torch counts references: torch_PID_RANDOM_NUMBER.
    left = [name for name in os.listdir("/dev/shm") if set(map(str, pair.pids)) & set(name.split("_"))]
    report.holds(f"{who} killed: nothing left in /dev/shm", not left, ", ".join(left) or "nothing")


async def refused(setting: Setting, report: Report) -> None:
    """Where the device permits no sharing between processes, the error names that and what to do."""
    with tempfile.TemporaryDirectory() as folder:
        models.make(models.SMALL, "float32", "cpu", Path(folder))
        async with started(setting, Path(folder), "float32", holder=True) as pair:
            message = str(await pair.ask_engine("refuse"))
            report.holds("CUDA IPC refused: the message", "\n" in message, message.replace("\n", " | ") or "no error")


async def training(
    setting: Setting, report: Report, shape: str, lora: bool, quantization: str | None = None, **more: Any
) -> None:
    """Two sequences of 16,384 tokens through trainer "grpo" alone: a figure, beside prime-rl's own where it has one."""
    for package, what in (("peft", lora), ("bitsandbytes", quantization)):
        if what and importlib.util.find_spec(package) is None:
            report.note("NOT RUN", f"this needs {package}, which is not installed")
            return
    work = Work(shape, lora, setting.device, quantization=quantization, **more)
    if setting.small:
        work = replace(work, shape="small", tokens=256, offloading=False)
    found = await measured(work)
    beside = f" beside a base in {quantization}" if quantization else ""
    report.note("shape", f"Qwen3 {work.shape}, {f'LoRA of rank 16{beside}' if lora else 'full'}")
    report.note("sequences", f"{work.sequences} of {work.tokens:,} tokens")
    report.note("parameters", found["parameters"])
    _enter_speed(report, "trained", found)
    for name in sorted(found):
        if name.endswith("_gib"):
            report.note(NAMED.get(name, f"most {name.removesuffix('_gib')}"), found[name], "GiB")
    norms = found["gradient_norms"]
    report.holds("gradients are numbers above 0", all(0 < norm < math.inf for norm in norms), str(norms))
    if "predicted_gib" in found and "allocated_gib" in found:
        report.within(
            "allocated, over what `atropos plan` says", found["allocated_gib"] / found["predicted_gib"], 0.9, 1.1
        )
    if importlib.util.find_spec("trl") is not None and not quantization and work.sequences > 1:
        try:
            theirs = await within(measured_trl(work), TRL_S, "TRL's update")
        except (RuntimeError, AtroposError) as error:
            report.note("TRL's update", f"NOT MEASURED: {str(error)[-500:]}")
        else:
            report.note("TRL's update", theirs["tokens_s"], "tokens/s")
            report.note("TRL's update", theirs["allocated_gib"], "GiB")
    if importlib.util.find_spec("unsloth") is not None and lora and setting.device != "cpu":
        pair = replace(work, sequences=max(work.sequences, 2))  # TRL makes no smaller groups
        try:
            theirs = await within(measured_trl(pair, unsloth=True), UNSLOTH_S, "Unsloth's update")
        except DeadlineExceeded:
            report.note("Unsloth's update", f"NOT MEASURED: it did not end in {UNSLOTH_S} s")
        except (RuntimeError, AtroposError) as error:  # theirs: it says nothing of this trainer
            report.note("Unsloth's update", f"NOT MEASURED: {str(error)[-500:]}")
        else:
            report.note("Unsloth's update", theirs["tokens_s"], "tokens/s")
            report.note("Unsloth's update", theirs["allocated_gib"], "GiB")
    other = PUBLISHED.get((work.shape, lora)) if not quantization else None
    if other is not None:
        report.note("prime-rl on an H100", other.tokens_s, "tokens/s")
        report.note("prime-rl on an H100", other.peak_gib, "GiB")
        report.note("prime-rl's record", other.source)


async def offloading(setting: Setting, report: Report) -> None:
    """The same updates with layer inputs, masters and moments in host memory: their gradients, and what it saves and costs. On a GPU
    also with expandable segments: how much more than its tensors the allocator holds."""
    work = Work("small", False, setting.device, 256) if setting.small else Work("0.6B", False, setting.device)
    here = await measured(work)
    _enter_speed(report, "trained, on the device", here)
    there = await measured(replace(work, offloading=True))
    _enter_speed(report, "trained, offloading", there)
    apart = max(abs(a / b - 1) for a, b in zip(there["gradient_norms"], here["gradient_norms"], strict=True))
    report.at_most("gradient norms apart", apart, 0.01)
    if setting.device == "cpu":
        report.note("expandable segments: NOT RUN", "this needs a GPU")
        return
    report.note("most allocated, on the device", here["allocated_gib"], "GiB")
    report.at_most("most allocated, offloading", there["allocated_gib"], here["allocated_gib"], "GiB")
    segments = await measured(replace(work, offloading=True, expandable=True))
    _enter_speed(report, "trained, offloading, expandable segments", segments)
    for name, found in (("offloading", there), ("offloading, expandable segments", segments)):
        report.note(f"most reserved, {name}", found["reserved_gib"], "GiB")


async def kernels(setting: Setting, report: Report) -> None:
    """The updates of training_0.6B_full and _lora with other kernels: liger-kernel's, layers compiled by torch.compile, and both. Gradient
    norms, tokens/s and memory next to those without. A measurement that fails is named, and the others are still made."""
    for lora in (False, True):
        whole = "LoRA" if lora else "full"
        if lora and importlib.util.find_spec("peft") is None:
            report.note(f"{whole}: NOT RUN", "this needs peft, which is not installed")
            continue
        work = Work("small", lora, setting.device, 256) if setting.small else Work("0.6B", lora, setting.device)
        plain: dict[str, Any] | None = None
        for name, change in KERNELS.items():
            if change.get("kernels") == "liger" and (
                importlib.util.find_spec("liger_kernel") is None or setting.device == "cpu"
            ):
                report.note(f"{whole}, {name}: NOT RUN", "this needs liger-kernel, and a GPU")
                continue
            try:
                found = await within(
                    measured(replace(work, **change)),
                    KERNELS_S * (3 if setting.device == "cpu" else 1),
                    f"{whole}, {name}",
                )
            except (RuntimeError, AtroposError) as error:
                report.holds(f"{whole}, {name}: ran", False, str(error)[-500:])
                continue
            _enter_speed(report, f"{whole}, {name}", found)
            report.note(f"{whole}, {name}: first update", found["seconds"][0], "s")
            memory = "allocated_gib" if setting.device != "cpu" else "resident_gib"
            report.note(f"{whole}, {name}, at most", found[memory], "GiB")
            if plain is None:
                plain = found
            else:
                pairs = zip(found["gradient_norms"], plain["gradient_norms"], strict=True)
                report.at_most(f"{whole}, {name}: gradient norms apart", max(abs(a / b - 1) for a, b in pairs), 0.01)


async def head(setting: Setting, report: Report) -> None:
    """The language-model head by the trainer's Triton kernels: values and gradients beside float64, time and memory beside torch's own
    operations and TRL's kernels."""
    if importlib.util.find_spec("triton") is None or (
        setting.device == "cpu" and not os.environ.get("TRITON_INTERPRET")
    ):
        report.note("NOT RUN", "this needs triton, and a GPU or TRITON_INTERPRET=1")
        return
    found = await at_head.compared(setting.device, small=setting.small)
    for dtype, apart in found["apart"].items():
        for name, value in apart.items():
            bound, unit = (at_head.BOUND[dtype], "") if name.startswith("gradient") else (at_head.VALUES, "nats")
            report.at_most(f"{dtype}: {name}, apart from float64", value, bound, unit)
    for way, took in found["timed"].items():
        report.note(f"forward and backward, {way}", took["seconds"], "s")
        report.note(f"forward and backward, {way}", took["gib"], "GiB")


async def gradients(setting: Setting, report: Report) -> None:
    """Random trees of sequences through a small model: the gradient by each way of attention, beside that of separate sequences."""
    for found in await compared(setting.device):
        name = "{dtype}, {attention}, {sequences}".format(**found)
        report.at_most(f"{name}: gradient apart from separate sequences in float32", found["apart"], found["bound"])


async def trees(setting: Setting, report: Report) -> None:
    """Eight branches of 8,192 tokens that share three quarters of them: by levels, in the padded layout, and each by itself."""
    small = setting.small
    shape, length, device = ("small", 256, setting.device) if small else ("0.6B", 8192, setting.device)
    work = Work(shape, False, device, length, branches=8, warm=1, steps=2)
    apart = await measured(replace(work, share_prompts=False))
    names = "allocated_gib" if device != "cpu" else "resident_gib"
    _enter_speed(report, "each by itself", apart)
    report.note("each by itself, at most", apart[names], "GiB")
    for attention in ("flash", "padded"):
        found = await measured(replace(work, attention=attention))
        _enter_speed(report, f"shared, {attention}", found)
        report.note(f"shared, {attention}: over each by itself", found["tokens_s"] / apart["tokens_s"], "times")
        report.note(f"shared, {attention}, at most", found[names], "GiB")
        first = abs(found["gradient_norms"][0] / apart["gradient_norms"][0] - 1)
        report.at_most(f"shared, {attention}: first gradient norm apart", first, 0.02)


async def groups(setting: Setting, report: Report) -> None:
    """Eight groups of eight replies of 256 to 1,535 tokens, prompts of 512: by each way of attention, and TRL where it is installed."""
    shape, tokens = ("small", 128) if setting.small else ("0.6B", 2048)
    work = Work(shape, False, setting.device, tokens, groups=2 if setting.small else 8, warm=1, steps=3)
    first: list[float] = []
    for attention in ("padded", "flash"):
        found = await measured(replace(work, attention=attention))
        _enter_speed(report, attention, found)
        if setting.device != "cpu":
            report.note(f"{attention}, at most", found["allocated_gib"], "GiB")
        first.append(found["gradient_norms"][0])
    report.at_most("first gradient norms apart", abs(first[0] / first[1] - 1), 0.02)
    if importlib.util.find_spec("trl") is not None:
        theirs = await measured_trl(work)
        report.note("TRL's update, a group at a time", theirs["tokens_s"], "tokens/s")
        report.note("TRL's update, a group at a time", theirs["allocated_gib"], "GiB")


CHECKS = (
    *vllm_checks.CHECKS,
    Check("updates_float32", partial(updates, dtype="float32"), 240, "ipc"),
    Check("updates_bfloat16", partial(updates, dtype="bfloat16"), 240, "ipc"),
    Check("graphs", graphs, 240, "ipc"),
    Check("one_copy", one_copy, 480, "ipc"),
    Check("owner_killed", partial(killed, victim=0), 180, "ipc"),
    Check("attached_killed", partial(killed, victim=1), 180, "ipc"),
    Check("refused", refused, 120, "ipc"),
    Check("two_ranks", two_ranks, 150, "ipc"),
    Check("training_0.6B_full", partial(training, shape="0.6B", lora=False), 600, "training"),
    Check("training_0.6B_lora", partial(training, shape="0.6B", lora=True), 600, "training"),
    Check("head", head, 240, "training"),
    Check("gradients", gradients, 240, "training"),
    Check("trees", trees, 600, "training"),
    Check("groups", groups, 600, "training"),
    Check("decoding", decoding, 600, "training"),
    Check("kernels", kernels, 900, "training"),
    Check("offloading", offloading, 900, "training"),
    Check("training_4B_full", partial(training, shape="4B", lora=False), 900, "training"),
    Check("training_4B_lora", partial(training, shape="4B", lora=True), 900, "training"),
    Check("training_8B_nf4", partial(training, shape="8B", lora=True, quantization="nf4", **LONG), 900, "training"),
    Check("loop", loop, 900, "runs"),
    Check("learning_ipc", partial(learns, bridge="ipc"), 400, "runs"),
    Check("learning_lora", partial(learns, bridge="lora"), 400, "runs"),
)


def _enter_speed(report: Report, name: str, found: dict[str, Any]) -> None:
    """Enter what one measurement found: tokens/s, FLOP/s of the model, and their share of what a plain product reaches on this device."""
    report.note(name, found["tokens_s"], "tokens/s")
    report.note(f"{name}, FLOPs of the model", found["model_flops_s"] / 1e12, "TFLOP/s")
    report.within(f"{name}, share of what a plain product reaches here", found["utilization"], 0, UTILIZATION)


async def _sample(pair: Pair, version: int) -> tuple[list[Tokens], list[Completion]]:
    """Four continuations of each of eight prompts, and the prompt of each."""
    random = np.random.default_rng([3, version])
    prompts = [ids(random, models.VOCABULARY, int(length)) for length in random.integers(4, 40, 8)]
    seeds = [[100 * version + 4 * i + j for j in range(4)] for i in range(8)]
    made = await asyncio.gather(
        *(pair.engine.sample(p, 4, Sampling(24), seed, 120) for p, seed in zip(prompts, seeds, strict=True))
    )
    return [prompt for prompt in prompts for _ in range(4)], [completion for call in made for completion in call]


def _batch(prompts: Sequence[Tokens], made: Sequence[Completion], version: int, random: np.random.Generator) -> Batch:
    """With random advantages: it is not what is learned that counts here."""
    lengths = [len(prompt) + len(completion.tokens) for prompt, completion in zip(prompts, made, strict=True)]
    sampled = np.concatenate([np.arange(n) >= len(prompt) for prompt, n in zip(prompts, lengths, strict=True)])
    logprobs, versions = np.zeros(len(sampled), np.float32), np.full(len(sampled), version - 1, np.int32)
    logprobs[sampled] = np.concatenate([completion.logprobs for completion in made])
    advantages = np.repeat(random.normal(size=len(made)), lengths)
    return Batch(
        tokens=np.concatenate([part for p, c in zip(prompts, made, strict=True) for part in (p, c.tokens)]),
        offsets=np.cumsum([0, *lengths]).astype(np.int64),
        sampled=sampled,
        trained=sampled.copy(),
        logprobs=logprobs,
        has_logprobs=np.ones(len(made), np.bool_),
        policy_version=versions,
        advantages=np.where(sampled, advantages, 0).astype(np.float32),
        temperature=np.ones(len(made), np.float32),
        truncated=np.zeros(len(made), np.bool_),
        group=np.repeat(np.arange(len(made) // 4, dtype=np.int32), 4),
        version=version,
    )


async def _error(call: Awaitable[object]) -> AtroposError | None:
    try:
        await call
    except AtroposError as error:
        return error
    return None


def _require(claim: bool, otherwise: str) -> None:
    if not claim:
        raise AssertionError(otherwise)

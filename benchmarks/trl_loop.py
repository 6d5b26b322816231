"""TRL's GRPOTrainer on a model and its prompts. Runs in an environment with TRL: benchmarks/quickstart.py, real_model.py and
tests/gpu/loop.py start it.

Arguments: a JSON object with model, problems (question, number), steps, skip, batch, prompts, group, max_tokens, learning_rate, threads.
It may also have device ("cpu"), dtype ("float32"), and vllm: the share of the device's memory for a vLLM in this process, which then
samples. With number null, the reward of a reply is a digest of its text.
Prints one line: JSON with trajectories_per_s, mean_tokens and the seconds of a step's sampling over the steps after the first `skip`,
and the most memory that was resident.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from hashlib import sha256

given = json.loads(sys.argv[1])
os.environ["OMP_NUM_THREADS"] = str(given["threads"])
if given.get("vllm"):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its engine, in this process, gets the trained weights here

import torch  # noqa: E402 - the number of threads is set first
from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

torch.set_num_threads(given["threads"])
lengths: list[int] = []


def reward(completions, number, completion_ids, **_):
    lengths.extend(len(ids) for ids in completion_ids)
    texts = [completion[-1]["content"] for completion in completions]
    return [
        sha256(text.encode()).digest()[0] / 255 if gold is None else float(text.rpartition("####")[2].strip() == gold)
        for text, gold in zip(texts, number, strict=True)
    ]


class Clock(TrainerCallback):
    def __init__(self):
        self.at = []

    def on_step_end(self, *_, **__):
        self.at.append(time.perf_counter())


class Timed(GRPOTrainer):
    """Measures its sampling: the tokens, without their rewards or the logprobs of the trained model."""

    sampling: list[float] = []  # noqa: RUF012 - there is one trainer

    def _generate(self, *given_, **named):
        began = time.perf_counter()
        made = super()._generate(*given_, **named)
        self.sampling.append(time.perf_counter() - began)
        return made


def vllm_options() -> dict:
    if not given.get("vllm"):
        return {}
    return {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": given["vllm"]}


rows = [{"prompt": [{"role": "user", "content": q}], "number": number} for q, number in given["problems"]]
clock = Clock()
rollouts = given["prompts"] * given["group"]
dtype, on_cpu = given.get("dtype", "float32"), given.get("device", "cpu") == "cpu"
with tempfile.TemporaryDirectory() as directory:
    config = GRPOConfig(
        output_dir=directory,
        use_cpu=on_cpu,
        bf16=dtype == "bfloat16",
        max_steps=given["steps"],
        per_device_train_batch_size=given["batch"],
        gradient_accumulation_steps=rollouts // given["batch"],
        num_generations=given["group"],
        max_completion_length=given["max_tokens"],
        temperature=1.0,
        learning_rate=given["learning_rate"],
        beta=0.0,
        report_to=[],
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        model_init_kwargs={"dtype": dtype},
        **vllm_options(),
    )
    trainer = Timed(
        given["model"], reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows), callbacks=[clock]
    )
    trainer.train()
skip = given["skip"]
counted = len(clock.at) - skip
print(json.dumps({
    "trajectories_per_s": counted * rollouts / (clock.at[-1] - clock.at[skip - 1]),
    "sampling_s": sum(Timed.sampling[skip:]) / max(len(Timed.sampling[skip:]), 1),
    "step_s": (clock.at[-1] - clock.at[skip - 1]) / counted,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "mean_tokens": sum(lengths[skip * rollouts :]) / max(len(lengths[skip * rollouts :]), 1),
}))  # fmt: skip

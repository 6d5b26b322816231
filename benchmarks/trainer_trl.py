"""Update steps of TRL's GRPOTrainer, or of what Unsloth makes of it, on batches that are given. Runs in .venv-trl;
benchmarks/trainer.py starts it.

Generation and rewards are left out: what TRL makes of them for its update is put in their place, padded as it pads, prompts
to the left and completions to the right, over all that is generated for one step. Everything after it is TRL's own.

Argument: a JSON object with model, batches (files of numpy, one of them for each step), together (sequences that go through the
model at once), group, threads, gradient_checkpointing; device, dtype and lora (its rank) where they are not the CPU, float32 and a
whole model; unsloth (the longest sequence, and whether the base is in 4 bits), with lora on a GPU. Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from itertools import pairwise

given = json.loads(sys.argv[1])
os.environ["OMP_NUM_THREADS"] = str(given["threads"])
if given.get("unsloth"):
    os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"  # it would ask a hub
    os.environ["UNSLOTH_COMPILE_LOCATION"] = tempfile.mkdtemp(
        dir=os.path.dirname(given["batches"][0])
    )  # not the working directory
    import unsloth  # before trl and transformers, which it changes

import numpy as np  # noqa: E402 - the number of threads is set first
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.trainer.utils import pad  # noqa: E402

from benchmarks import resident  # noqa: E402

torch.set_num_threads(given["threads"])
device, dtype, rank = given.get("device", "cpu"), given.get("dtype", "float32"), given.get("lora", 0)


def generated(file):
    with np.load(file) as columns:
        offsets, tokens, sampled, advantages = (
            columns[name] for name in ("offsets", "tokens", "sampled", "advantages")
        )
    prompts, completions = [], []
    for begin, end in pairwise(offsets):
        row = torch.from_numpy(tokens[begin:end].astype(np.int64))
        replied = torch.from_numpy(sampled[begin:end])
        prompts.append(row[~replied])
        completions.append(row[replied])
    masks = [[torch.ones_like(row) for row in rows] for rows in (prompts, completions)]
    return {
        "prompt_ids": pad(prompts, padding_value=0, padding_side="left"),
        "prompt_mask": pad(masks[0], padding_value=0, padding_side="left"),
        "completion_ids": pad(completions, padding_value=0, padding_side="right"),
        "completion_mask": pad(masks[1], padding_value=0, padding_side="right"),
        "advantages": torch.from_numpy(advantages[offsets[1:] - 1]),
        "num_items_in_batch": torch.tensor(int(sampled.sum())),
    }


class Given(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        made = generated(given["batches"][self.state.global_step])
        return {name: tensor.to(self.accelerator.device) for name, tensor in made.items()}


class Clock(TrainerCallback):
    def __init__(self):
        self.begun, self.seconds, self.busy = (0.0, 0.0), [], []

    def on_step_begin(self, *_, **__):
        self.begun = time.perf_counter(), time.process_time()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.perf_counter() - self.begun[0])
        self.busy.append(time.process_time() - self.begun[1])


def reward(completions, **_):
    raise RuntimeError("nothing is generated, so nothing is graded")


with np.load(given["batches"][0]) as columns:
    rollouts = len(columns["offsets"]) - 1
clock = Clock()
with tempfile.TemporaryDirectory() as directory:
    config = GRPOConfig(
        output_dir=directory,
        use_cpu=device == "cpu",
        bf16=False,
        max_steps=len(given["batches"]),
        per_device_train_batch_size=given["together"],
        gradient_accumulation_steps=rollouts // given["together"],
        num_generations=given["group"],
        loss_type="grpo",
        beta=0.0,
        report_to=[],
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        gradient_checkpointing=given["gradient_checkpointing"],
        dataloader_pin_memory=False,
        model_init_kwargs=None if given.get("unsloth") else {"dtype": dtype},
    )
    rows = Dataset.from_list([{"prompt": "1"}] * (rollouts // given["group"] * len(given["batches"])))
    model, adapter, tokenizer = given["model"], None, None
    if given.get("unsloth"):
        model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
            model,
            dtype=getattr(torch, dtype),
            max_seq_length=given["unsloth"]["longest"],
            load_in_4bit=given["unsloth"]["in_4_bits"],
        )
        model = unsloth.FastLanguageModel.get_peft_model(
            model, r=rank, lora_alpha=2 * rank, use_gradient_checkpointing="unsloth", random_state=0
        )
    elif rank:
        from peft import LoraConfig

        adapter = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    trainer = Given(
        model, reward_funcs=reward, args=config, train_dataset=rows, callbacks=[clock], peft_config=adapter,
        processing_class=tokenizer,
    )  # fmt: skip
    for parameter in trainer.model.parameters():
        parameter.data.add_(0)  # a file that is mapped is resident once it is touched
    loaded = resident.settle()
    trainer.train()
found = {"seconds": clock.seconds, "busy": clock.busy, "loaded": loaded, "highest": resident.highest()}
if device != "cpu":
    found |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
print(json.dumps(found))

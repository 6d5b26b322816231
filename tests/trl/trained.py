"""TRL's own trainer on an exported data set, from an exported policy. Runs in an environment with TRL:

python trained.py sft|dpo DATA MODEL RESULT.json
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

COLUMNS = {"sft": ("input_ids",), "dpo": ("prompt_ids", "chosen_ids", "rejected_ids")}


def trained(form: str, data: str, directory: str, output: str) -> dict[str, Any]:
    kind = "parquet" if data.endswith(".parquet") else "json"
    rows = load_dataset(kind, data_files=data, split="train", cache_dir=f"{output}/cache")
    model = AutoModelForCausalLM.from_pretrained(directory)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    config, trainer_class = {"sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer)}[form]
    arguments = config(
        output_dir=output, max_steps=3, per_device_train_batch_size=2, learning_rate=1e-3, lr_scheduler_type="constant",
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, seed=0,
        max_length=512,
    )  # fmt: skip
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(directory)
    )
    trainer.train()
    changed = sum(float((value - before[name]).abs().sum()) for name, value in model.named_parameters())
    assert math.isfinite(changed)
    return {
        "columns": rows.column_names,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "changed": changed,
        "tokens": [{name: trainer.train_dataset[at][name] for name in COLUMNS[form]} for at in range(len(rows))],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    form, data, directory, result = sys.argv[1:]
    with tempfile.TemporaryDirectory() as output:
        found = trained(form, data, directory, output)
    with open(result, "w") as file:
        json.dump(found, file)

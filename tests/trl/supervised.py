"""One batch of rows in TRL's own SFTTrainer: its tokens, its loss and its gradient. Runs in an environment with TRL:

python supervised.py ROWS MODEL OUT TEMPLATE
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import load_dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


def main(rows: str, directory: str, out: Path, template: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if template:
        tokenizer.chat_template = template
    with tempfile.TemporaryDirectory() as output:
        data = load_dataset("json", data_files=rows, split="train", cache_dir=f"{output}/cache")
        of_messages = "messages" in data.column_names
        # Two micro-batches of one batch: the average is over the tokens of both.
        arguments = SFTConfig(
            output_dir=output, max_steps=1, per_device_train_batch_size=len(data) // 2, gradient_accumulation_steps=2, learning_rate=0.0,
            max_grad_norm=0.0, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, seed=0,
            max_length=None, save_strategy="no", logging_steps=1, assistant_only_loss=of_messages,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
        gradient: dict[str, torch.Tensor] = {}
        trainer.create_optimizer()

        def look(*_: object) -> None:
            gradient.update(
                {name: one.grad.clone() for name, one in trainer.model.named_parameters() if one.grad is not None}
            )

        trainer.optimizer.register_step_pre_hook(look)
        trainer.train()
        found = [{name: trainer.train_dataset[at][name] for name in ("input_ids", "labels")} for at in range(len(data))]
        [loss] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    save_file({name: value.contiguous() for name, value in gradient.items()}, out / "gradient.safetensors")
    (out / "found.json").write_text(json.dumps({"rows": found, "loss": loss}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])

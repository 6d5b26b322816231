"""DPO of the cookbook on pairs in a local file: dpo.py OUT MODEL PAIRS LOG. Each line of PAIRS has a question, a good and a bad answer."""

import json
import sys
from pathlib import Path

import chz
import datasets
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

out, model, pairs, log = sys.argv[1:]


@chz.chz
class LocalPairs(ComparisonDatasetBuilder):
    def get_train_and_test_datasets(self):
        return datasets.Dataset.from_list([json.loads(line) for line in Path(pairs).read_text().splitlines()]), None

    def example_to_labeled_comparison(self, example):
        answers = [[{"role": "assistant", "content": example[name]}] for name in ("good", "bad")]
        return LabeledComparison(Comparison([{"role": "user", "content": example["question"]}], *answers), "A")


common = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=model, renderer_name="role_colon", max_length=256, batch_size=8
)
train_dpo.main(
    train_dpo.Config(
        log_path=log,
        model_name=model,
        recipe_name="dpo",
        renderer_name="role_colon",
        dataset_builder=DPODatasetBuilderFromComparisons(comparison_builder=LocalPairs(), common_config=common),
        learning_rate=1e-3,
        lora_rank=8,
        save_every=0,
        eval_every=0,
        infrequent_eval_every=0,
        max_steps=8,
    )
)
Path(out).write_text(json.dumps([json.loads(line) for line in (Path(log) / "metrics.jsonl").read_text().splitlines()]))

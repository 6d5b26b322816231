"""Conversations with the problems of the recipe math_rl, as its renderer writes them: arithmetic.py OUT MODEL STEPS GROUPS.

Each problem comes twice: with its answer, and with 0."""

import json
import sys
from pathlib import Path

import numpy as np
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticEnv
from tinker_cookbook.renderers import TrainOnWhat, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

out, model, steps, groups = sys.argv[1:]
renderer = get_renderer("role_colon", tokenizer=get_tokenizer(model))
rows = []
for step in range(int(steps)):
    dice = np.random.RandomState(step)  # as ArithmeticDataset draws them
    for _ in range(int(groups)):
        env = ArithmeticEnv(int(dice.randint(0, 101)), int(dice.randint(0, 101)), renderer)
        for answer in (env.get_reference_answer(), "0"):
            messages = [
                *ArithmeticEnv.standard_fewshot_prefix(),
                {"role": "user", "content": env.get_question()},
                {"role": "assistant", "content": answer},
            ]
            built, weights = renderer.build_supervised_example(messages, TrainOnWhat.LAST_ASSISTANT_MESSAGE)
            rows.append([list(built.to_ints()), [int(one) for one in weights]])
Path(out).write_text(json.dumps(rows))

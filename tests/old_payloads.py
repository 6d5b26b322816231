"""Groups as an unmodified environment of atroposlib posts them."""

from __future__ import annotations

import gzip
import json
from typing import Any

import numpy as np

VOCABULARY = 150_000


def old_group(sequences: int, length: int, seed: int, env_id: int | None = 0) -> dict[str, Any]:
    """The first quarter of each sequence is the prompt: mask -100, logprob 1.0. `scores[0]` is the seed."""
    random = np.random.default_rng(seed)
    prompt = length // 4
    tokens = random.integers(0, VOCABULARY, (sequences, length))
    masks, logprobs = tokens.copy(), -random.exponential(1.0, (sequences, length))
    masks[:, :prompt], logprobs[:, :prompt] = -100, 1.0
    return {
        "tokens": tokens.tolist(),
        "masks": masks.tolist(),
        "scores": [float(seed), *random.random(sequences - 1).tolist()],
        "advantages": None,
        "ref_logprobs": None,
        "inference_logprobs": logprobs.tolist(),
        "messages": None,
        "generation_params": None,
        "overrides": None,
        "group_overrides": None,
        "images": None,
        "env_id": env_id,
    }


def body(group: dict[str, Any], zipped: bool) -> bytes:
    """As BaseEnv encodes it: gzip level 9, from 1,024 bytes on."""
    plain = json.dumps(group).encode()
    return gzip.compress(plain, 9) if zipped and len(plain) >= 1024 else plain


def trainer(batch_size: int) -> bytes:
    """The body of /register."""
    return json.dumps(
        {
            "wandb_group": "g",
            "wandb_project": "p",
            "batch_size": batch_size,
            "max_token_len": 2048,
            "checkpoint_dir": "c",
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": 1_000_000,
        }
    ).encode()


def environment(name: str, group_size: int, weight: float = 1.0) -> bytes:
    """The body of /register-env."""
    return json.dumps(
        {
            "max_token_length": 2048,
            "desired_name": name,
            "weight": weight,
            "group_size": group_size,
            "min_batch_allocation": None,
        }
    ).encode()

"""A trainer as atroposlib's example has it: its API client, unmodified. Run by atroposlib's Python.

Says each batch on a line of output: the numbers of its groups, their sizes and keys. With the log of an environment as last argument,
it takes the next batch when that environment has seen the first step, and then the second, and has evaluated.
"""

import json
import sys
import time
from pathlib import Path

from example_trainer.api import check_atropos_api, get_batch, register_trainer
from example_trainer.config import TrainingConfig

SERVER, BATCH_SIZE, BATCHES, DEADLINE_S = sys.argv[1], *map(int, sys.argv[2:5])
ENVIRONMENT = Path(sys.argv[5]) if len(sys.argv) > 5 else None

assert check_atropos_api(SERVER, timeout=20)
register_trainer(
    TrainingConfig(
        model_name="scripted", atropos_url=SERVER, batch_size=BATCH_SIZE, gradient_accumulation_steps=1, seq_len=200,
        training_steps=BATCHES, checkpoint_interval=0,
    )
)  # fmt: skip
print("REGISTERED", flush=True)
until, got = time.time() + DEADLINE_S, 0
while got < BATCHES and time.time() < until:
    batch = get_batch(SERVER)["batch"]
    if batch is None:
        print("WAITING", flush=True)
        time.sleep(0.1)
        continue
    got += 1
    groups = [[(group["generation_params"] or {}).get("tag"), len(group["tokens"]), sorted(group)] for group in batch]
    print("BATCH", json.dumps(groups), flush=True)
    awaited = {1: "SAW 1\n", 2: "EVALUATED"}.get(got, "")
    while ENVIRONMENT and awaited not in ENVIRONMENT.read_text() and time.time() < until:
        time.sleep(0.05)
print("DONE", got, flush=True)

"""A fully asynchronous training in a process of its own, to be killed: it writes down what it trained, and waits where configured.

python -m tests.skyrl.killed_training FOLDER [PLACE STEP]
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
from pathlib import Path

from tests.skyrl.test_fully_async import Recorded, Tasks, made
from tests.skyrl.test_train import SEVENS

SAVING = {
    "trainer.ckpt_interval": 3,
    "trainer.epochs": 1,
    "trainer.max_training_steps": None,
    "trainer.resume_mode": "latest",
}


class Ledger:
    """One line for each thing that happened, on disk before anything follows."""

    def __init__(self, folder, place=None, step=None):
        self.place, self.step = place, step
        self.file = (folder / "ledger.jsonl").open("a")

    def write(self, **line):
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())

    def wait_if(self, place, step):
        if (place, step) == (self.place, self.step):
            self.write(waits=place, step=step)
            time.sleep(120)
            raise TimeoutError("nobody killed this process")


async def train(folder, ledger):
    trainer, dispatch, _ = made(folder, Tasks(), **SAVING)

    class Watched(Recorded):
        def optim_step(self, model):
            ledger.wait_if("in a step", trainer.global_step)
            return super().optim_step(model)

        def save_checkpoint(self, model, directory, tokenizer):
            super().save_checkpoint(model, directory, tokenizer)
            ledger.wait_if("in a checkpoint", trainer.global_step)

        def load_checkpoint(self, model, directory, **others):
            super().load_checkpoint(model, directory, **others)
            ledger.write(loaded=self.digest())

        def digest(self):
            return hashlib.sha256(self.table.detach().numpy().tobytes()).hexdigest()

    trainer.dispatch = Watched(trainer.cfg, dispatch.client, 3.0, SEVENS)
    trainer._cleanup_old_checkpoints = lambda: ledger.wait_if("removing old checkpoints", trainer.global_step)
    run = trainer._run_training

    async def run_and_write(training_input):
        tasks = sorted(set(training_input.metadata["uids"]))
        step = trainer.global_step
        status = await run(training_input)
        ledger.write(step=step, tasks=tasks, weights=trainer.dispatch.digest())
        return status

    trainer._run_training = run_and_write
    await trainer.train()
    ledger.write(ended=trainer.global_step)


if __name__ == "__main__":
    folder, *where = sys.argv[1:]
    asyncio.run(train(Path(folder), Ledger(Path(folder), *where[:1], *map(int, where[1:]))))

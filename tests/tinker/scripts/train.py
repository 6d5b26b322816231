"""Train one adapter with seeded data, sample from it, save it: train.py OUT MODEL SEED STEPS [CHECKPOINT]. After each step a line is
added to OUT.progress. With CHECKPOINT, training continues from there, as a script that was killed does when it is run again."""

import json
import random
import sys
from pathlib import Path

import tinker
from tinker import types

out, model, seed, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
checkpoint = sys.argv[5] if len(sys.argv) > 5 else None
progress = out.with_suffix(".progress")
done = int(checkpoint.rsplit("/", 1)[1].removeprefix("step")) if checkpoint else 0


def batch(step: int) -> list[types.Datum]:
    dice = random.Random(1000 * seed + step)
    found = []
    for _ in range(3):
        tokens = [dice.randrange(3, 40) for _ in range(dice.randrange(4, 12))]
        weights = [dice.random() for _ in tokens[1:]]
        inputs = {"target_tokens": tokens[1:], "weights": weights}
        found.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs))
    return found


with tinker.ServiceClient() as service:
    if checkpoint:
        training = service.create_training_client_from_state_with_optimizer(checkpoint).result()
    else:
        training = service.create_lora_training_client(base_model=model, rank=2 + seed % 3, seed=seed).result()
    losses, samples, paths = [], [], []
    for step in range(done, steps):
        first = training.forward_backward(batch(step), "cross_entropy")
        second = training.forward_backward(batch(step + 500), "cross_entropy")
        update = training.optim_step(types.AdamParams(learning_rate=1e-2))
        losses += [first.result().metrics["loss:sum"], second.result().metrics["loss:sum"]]
        update.result()
        if step % 4 == 3:
            paths.append(training.save_state(f"step{step + 1}").result().path)
            sampler = training.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=8, seed=step)
            sample = sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 2, params).result()
            samples += [[one.tokens, one.logprobs] for one in sample.sequences]
        with progress.open("a") as file:
            file.write(f"{step + 1} {paths[-1] if paths else ''}\n")
    final = training.save_state("final").result().path
out.write_text(json.dumps({"losses": losses, "samples": samples, "final": final, "paths": paths}))

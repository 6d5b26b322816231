"""Sample from snapshots of an adapter while it is trained, several at once and the base model: snapshots.py OUT MODEL RANK_TOO_HIGH."""

import json
import sys
from pathlib import Path

import tinker
from tinker import types

out, model, too_high = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
TOKENS = [5, 9, 11, 7, 30, 21, 8]
PROMPT = types.ModelInput.from_ints(TOKENS[:3])
PARAMS = types.SamplingParams(max_tokens=12, seed=3, temperature=1.0)
found: dict[str, object] = {"tokens": TOKENS, "prompt": TOKENS[:3]}


def train(client, targets: list[int], steps: int) -> None:
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(targets[:-1]),
        loss_fn_inputs={"target_tokens": targets[1:], "weights": [1.0] * (len(targets) - 1)},
    )
    for _ in range(steps):
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=3e-2)).result()


def sampled(client) -> dict[str, object]:
    """Four samples, and the logprobs of the prompt and of TOKENS."""
    future = client.sample(PROMPT, 4, PARAMS, include_prompt_logprobs=True)
    scored = client.compute_logprobs(types.ModelInput.from_ints(TOKENS))
    result = future.result()
    return {
        "sequences": [[list(one.tokens), list(one.logprobs), str(one.stop_reason)] for one in result.sequences],
        "prompt": list(result.prompt_logprobs),
        "scored": list(scored.result()),
    }


service = tinker.ServiceClient()
with_head = service.create_lora_training_client(base_model=model, rank=8, seed=1).result()
without = service.create_lora_training_client(base_model=model, rank=4, seed=2, train_unembed=False).result()
train(with_head, TOKENS, 2)
train(without, TOKENS[::-1], 3)
found["files"] = {
    "first": with_head.save_weights_for_sampler("first").result().path,
    "other": without.save_weights_for_sampler("other").result().path,
}
clients = {
    "first": with_head.save_weights_and_get_sampling_client().result(),
    "other": without.save_weights_and_get_sampling_client().result(),
    "base": service.create_sampling_client(base_model=model).result(),
}
before = {name: sampled(client) for name, client in clients.items()}
train(with_head, TOKENS, 2)
found["files"]["second"] = with_head.save_weights_for_sampler("second").result().path
clients["second"] = with_head.save_weights_and_get_sampling_client().result()
found["before"] = before
found["after"] = {name: sampled(client) for name, client in clients.items()}

high = service.create_lora_training_client(base_model=model, rank=too_high, seed=3).result()
refused = high.save_weights_and_get_sampling_client().result()
try:
    refused.sample(PROMPT, 1, PARAMS).result()
    found["refused"] = None
except tinker.RequestFailedError as error:
    found["refused"] = str(error)
try:
    warm = types.SamplingParams(max_tokens=4, seed=3, temperature=0.5)
    clients["first"].sample(PROMPT, 1, warm, topk_sample_logprobs=2).result()
    found["warm"] = None
except tinker.RequestFailedError as error:
    found["warm"] = str(error)
out.write_text(json.dumps(found))

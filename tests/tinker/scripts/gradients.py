"""One optimizer step with each loss, all from the same weights: gradients.py OUT MODEL."""

import json
import sys
from pathlib import Path

import tinker
from tinker import types

out, model = Path(sys.argv[1]), sys.argv[2]
SEQUENCES = ([5, 9, 11, 7, 30, 2, 8], [6, 4, 19, 3])
ADVANTAGES = ([0.5, -1.0, 2.0, 0.0, 1.0, -0.5], [1.5, -0.7, 0.3])
WEIGHTS = ([1.0, 0.0, 0.5, 2.0, -1.0, 1.0], [0.3, 1.0, -0.2])
APART = (
    [0.1, -0.3, 0.05, 0.4, -0.1, 0.3],
    [-0.25, 0.0, 0.15],
)  # of the sampler's logprobs from the trainer's: some ratios are clipped
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
ADAM = {"learning_rate": 1.0, "beta1": 0.9, "beta2": 0.95, "eps": 1.0, "weight_decay": 0.01}


def datum(tokens: list[int], **inputs: object) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **inputs}
    )


def squares(data, logprobs):
    loss = 0.1 * sum((one**2).sum() for one in logprobs)
    return loss, {}


service = tinker.ServiceClient()
first = service.create_lora_training_client(base_model=model, rank=4, seed=7).result()
plain = [datum(tokens) for tokens in SEQUENCES]
first.forward_backward(plain, "cross_entropy").result()
first.optim_step(types.AdamParams(learning_rate=1e-2)).result()  # so that neither matrix of a layer is zero
start = first.save_state("start").result().path
now = [one["logprobs"].tolist() for one in first.forward(plain, "cross_entropy").result().loss_fn_outputs]
old = [[lp + gap for lp, gap in zip(*pair, strict=True)] for pair in zip(now, APART, strict=True)]
found = {
    "start": start,
    "old": old,
    "after": {},
    "adam": ADAM,
    "sequences": SEQUENCES,
    "advantages": ADVANTAGES,
    "weights": WEIGHTS,
}
rollouts = [datum(tokens, logprobs=lp, advantages=a) for tokens, lp, a in zip(SEQUENCES, old, ADVANTAGES, strict=True)]
for name, data, settings in (
    ("cross_entropy", [datum(tokens, weights=w) for tokens, w in zip(SEQUENCES, WEIGHTS, strict=True)], None),
    ("importance_sampling", rollouts, None),
    ("ppo", rollouts, CLIP),
    ("cispo", rollouts, CLIP),
    ("dro", rollouts, {"beta": 0.1}),
    ("custom", plain, None),
):
    training = service.create_training_client_from_state(start).result()
    for one in data:  # two calls, whose gradients add up
        if name == "custom":
            training.forward_backward_custom([one], squares).result()
        else:
            training.forward_backward([one], name, settings).result()
    training.optim_step(types.AdamParams(**ADAM)).result()
    found["after"][name] = training.save_state(name).result().path
out.write_text(json.dumps(found))

"""Every public call of the official client, against the server at TINKER_BASE_URL: every_call.py OUT MODEL."""

import asyncio
import json
import pickle
import sys
from pathlib import Path

import tinker
import torch
from tinker import types

out, model = Path(sys.argv[1]), sys.argv[2]
found: dict[str, object] = {}

TOKENS = [5, 9, 11, 7, 30, 2, 8]


def datum(tokens: list[int], **inputs: object) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **inputs}
    )


rest = tinker.RestClient()
found["models"] = [one.model_name for one in rest.get_server_capabilities().result().supported_models]
service = tinker.ServiceClient(user_metadata={"who": "test"})
training = service.create_lora_training_client(
    base_model=model, rank=4, seed=7, user_metadata={"run": "first"}
).result()
info = training.get_info()
found["info"] = [info.model_data.model_name, info.is_lora, info.lora_rank, info.model_id == training.model_id]
tokenizer = training.get_tokenizer()
found["encoded"] = tokenizer.encode("1+1=2")

# -- losses
n = len(TOKENS) - 1
ones = [1.0] * n
first = training.forward([datum(TOKENS, weights=ones)], "cross_entropy").result()
found["base_logprobs"] = first.loss_fn_outputs[0]["logprobs"].tolist()
found["base_loss"] = first.metrics["loss:sum"]
sampled = {"logprobs": found["base_logprobs"], "advantages": [0.5, -1.0, 2.0, 0.0, 1.0, -0.5]}
losses = {}
for name, inputs, settings in (
    ("cross_entropy", {"weights": ones}, None),
    ("importance_sampling", sampled, None),
    ("ppo", sampled, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    ("cispo", sampled, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    ("dro", sampled, {"beta": 0.1}),
):
    result = training.forward_backward([datum(TOKENS, **inputs)], name, settings).result()
    losses[name] = result.metrics["loss:sum"]
found["losses"] = losses


def custom(data, logprobs):
    loss = sum((one**2).sum() for one in logprobs)
    return loss, {"custom": float(loss)}


result = training.forward_backward_custom([datum(TOKENS)], custom).result()
found["custom"] = result.metrics["loss:sum"]
handle = service.create_custom_loss(lambda logprobs: (-(logprobs.sum()), {}), input_ranks={"logprobs": 1}).result()
found["traced"] = training.forward_backward_custom([datum(TOKENS)], handle).result().metrics["loss:sum"]
top = training.forward(
    [types.Datum(types.ModelInput.from_ints(TOKENS[:2]), {"target_tokens": torch.tensor([[1, 2, 3], [4, 5, 6]])})],
    "cross_entropy",
).result()
found["two_dimensional"] = top.loss_fn_outputs[0]["logprobs"].to_numpy().tolist()
many = training.forward([datum(TOKENS[: 3 + i % 4], weights=ones[: 2 + i % 4]) for i in range(40)], "cross_entropy")
found["many"] = [len(one["logprobs"].data) for one in many.result().loss_fn_outputs]

# -- steps, pipelined as recipes do it
futures = []
for _ in range(3):
    futures.append(training.forward_backward([datum(TOKENS, weights=ones)], "cross_entropy"))
    futures.append(training.optim_step(types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)))
results = [one.result() for one in futures]
found["loss_falls"] = [one.metrics["loss:sum"] for one in results[::2]]

# -- saving and loading
saved = training.save_state("first", user_metadata={"step": "3"}).result().path
again = training.save_state("first", overwrite=True).result().path
found["saved"], found["overwritten"] = saved, again
for_sampler = training.save_weights_for_sampler("first", ttl_seconds=7200).result().path
found["for_sampler"] = for_sampler
trained = training.forward([datum(TOKENS)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
found["trained_logprobs"] = trained
training.load_state(saved).result()
training.load_state_with_optimizer(saved).result()
found["loaded_logprobs"] = (
    training.forward([datum(TOKENS)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
)
weights_only = service.create_training_client_from_state(saved).result()
resumed = service.create_training_client_from_state_with_optimizer(saved).result()
ends = {}
for name, client in (("weights_only", weights_only), ("resumed", resumed), ("training", training)):
    client.forward_backward([datum(TOKENS, weights=ones)], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    ends[name] = client.forward([datum(TOKENS)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
found["ends"] = ends

# -- sampling
snapshot = weights_only.save_weights_and_get_sampling_client().result()
named = service.create_sampling_client(model_path=for_sampler).result()
base = service.create_sampling_client(base_model=model).result()
prompt = types.ModelInput.from_ints(TOKENS[:4])
params = types.SamplingParams(max_tokens=6, seed=3, temperature=1.0)
sample = named.sample(prompt, 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=2)
sample = sample.result()
found["samples"] = [[one.tokens, one.logprobs, one.stop_reason, one.sequence_id] for one in sample.sequences]
found["prompt_logprobs"] = sample.prompt_logprobs
found["topk_prompt"] = sample.topk_prompt_logprobs
found["topk_sample"] = sample.sequences[0].topk_logprobs_np.token_ids.tolist()
found["again"] = [one.tokens for one in named.sample(prompt, 3, params).result().sequences]
found["computed"] = named.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
found["computed_base"] = base.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
found["computed_last"] = named.compute_logprobs(types.ModelInput.from_ints(TOKENS), 2).result()
found["snapshot"] = snapshot.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
greedy = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
found["past_ends"] = [len(one.tokens) for one in base.sample(prompt, 1, greedy).result().sequences]
asked = types.ModelInput.from_ints(tokenizer.encode("<|user|>What is 45 + 37?<|assistant|>"))
found["own_ends"] = {}
for name, stop in {"none": None, "an id": [7], "a text": ["zzz"]}.items():
    greedy = types.SamplingParams(max_tokens=40, temperature=0.0, stop=stop)
    [one] = base.sample(asked, 1, greedy).result().sequences
    found["own_ends"][name] = [one.tokens, one.stop_reason]
words = types.SamplingParams(max_tokens=12, seed=1, stop=["1", "2"])
found["stopped"] = [one.stop_reason for one in base.sample(prompt, 2, words).result().sequences]
clone = tinker.SamplingClient.from_sampler_handle(named.get_sampler_handle())
found["clone"] = [one.tokens for one in clone.sample(prompt, 3, params).result().sequences]
pickled = pickle.loads(pickle.dumps(named))
found["pickled"] = [one.tokens for one in pickled.sample(prompt, 3, params).result().sequences]
found["base_model"] = [named.get_base_model(), rest.get_sampler(named._sampling_session_id).result().model_path]
found["sampler_tokenizer"] = named.get_tokenizer().encode("1+1=2")


async def with_await() -> list[int]:
    return (await base.sample(prompt, 1, params)).sequences[0].tokens


found["awaited"] = asyncio.run(with_await())

# -- lists
session = service.holder.get_session_id()
found["runs"] = [
    [one.training_run_id, one.lora_rank, one.user_metadata] for one in rest.list_training_runs().result().training_runs
]
found["run"] = rest.get_training_run(training.model_id).result().last_checkpoint.tinker_path
found["run_by_path"] = rest.get_training_run_by_tinker_path(saved).result().training_run_id
found["checkpoints"] = sorted(one.tinker_path for one in rest.list_checkpoints(training.model_id).result().checkpoints)
found["user_checkpoints"] = rest.list_user_checkpoints().result().cursor.total_count
weights = rest.get_weights_info_by_tinker_path(saved).result()
found["weights_info"] = [weights.base_model, weights.lora_rank, weights.train_unembed]
found["session"] = rest.get_session(session).result().training_run_ids
found["session_listed"] = session in rest.list_sessions().result().sessions
rest.set_checkpoint_ttl_from_tinker_path(saved, 7200).result()
found["expires"] = str(rest.get_training_run(training.model_id).result().last_checkpoint.expires_at)
rest.delete_checkpoint_from_tinker_path(saved).result()
found["after_delete"] = [one.tinker_path for one in rest.list_checkpoints(training.model_id).result().checkpoints]

# -- what is refused
refused = {}
for name, call in {
    "publish": lambda: rest.publish_checkpoint_from_tinker_path(for_sampler).result(),
    "deleted": lambda: service.create_training_client_from_state(saved).result(),
    "base_model": lambda: service.create_lora_training_client(base_model="other/model").result(),
    "loss": lambda: training.forward_backward([datum(TOKENS, weights=ones)], "stable_reinforce").result(),
    "image": lambda: training.forward_backward(
        [
            types.Datum(
                types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)]),
                {"target_tokens": [1]},
            )
        ],
        "cross_entropy",
    ).result(),
    "step_after_failure": lambda: training.optim_step(types.AdamParams()).result(),
    "token": lambda: base.sample(types.ModelInput.from_ints([10**6]), 1, params).result(),
    "alternatives": lambda: base.sample(prompt, 1, params, prompt_alt_tokens_k=2).result(),
    "external": lambda: training.save_weights_external("x").result(),
    "inflight": lambda: training.save_weights_and_get_sampling_client(kind="inflight").result(),
    "copy": lambda: rest.copy_weights(for_sampler, destination_project_id="p").result(),
}.items():
    try:
        call()
        refused[name] = None
    except Exception as error:
        refused[name] = f"{type(error).__name__}: {error}"
found["refused"] = refused
alive = training.forward([datum(TOKENS)], "cross_entropy").result()
found["alive_after_refusals"] = alive.loss_fn_outputs[0]["logprobs"].tolist() == ends["training"]

service.close("success", detail="done").result()
try:
    service.create_lora_training_client(base_model=model).result()
except RuntimeError as error:
    found["closed"] = str(error)
out.write_text(json.dumps(found))

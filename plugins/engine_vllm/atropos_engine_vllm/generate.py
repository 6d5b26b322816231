"""Build requests to `/inference/v1/generate`, and read its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from atropos_core.errors import DataError, RemoteError, TrainingDiverged
from atropos_core.group_schema import check_sampling
from atropos_core.types import MOST_TIES, Completion, Floats, Kept, Sampling, Tokens, TopK, Versions, offsets_of
from atropos_engine_vllm.router_replay import routed_experts

PATH = "/inference/v1/generate"
_SEEDS = 2**63  # vLLM's are 64-bit, signed
_MASS_ROUNDING = 1e-3  # by which the probabilities of all kept tokens may differ from 1
_NOT_FINITE = -9999.0  # what vLLM sends in place of a logprob that JSON cannot hold


def check(prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], vocabulary: int, longest: int) -> None:
    """Raise DataError for a request that no model could answer."""
    if not len(prompt):
        raise DataError("a prompt has no tokens: there is nothing to continue")
    low, high = int(np.min(prompt)), int(np.max(prompt))
    if low < 0 or high >= vocabulary:
        raise DataError(
            f"token ids from {low} to {high} are not all in the model's vocabulary of {vocabulary}: they come from"
            " another tokenizer."
        )
    if len(seeds) < n:
        raise DataError(f"{n} continuations were requested with {len(seeds)} seeds: each needs its own")
    check_sampling(sampling)
    if len(prompt) + sampling.max_tokens > longest:
        raise DataError(
            f"a prompt of {len(prompt)} tokens and max_tokens = {sampling.max_tokens} make"
            f" {len(prompt) + sampling.max_tokens}, and the server takes {longest}.",
            remedy=f"Set max_tokens to at most {max(0, longest - len(prompt))}, or shorten the prompt.",
        )


def request(
    prompt: Tokens, sampling: Sampling, seed: int, stops: Sequence[int], salt: str, vocabulary: int
) -> dict[str, Any]:
    """Build the request for one reply. It lists all stop ids, so that it does not depend on the server's defaults.

    With `--logprobs-mode processed_logprobs`, logprobs refer to the distribution that was sampled from. For greedy requests,
    vLLM uses temperature 1 without top-p and top-k, so they refer to the model's own distribution."""
    parameters = {
        "n": 1,
        "seed": seed % _SEEDS,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.most_kept,
        "min_p": sampling.min_p,
        # 0: only the sampled token's. Otherwise, of all that are kept: their logprobs are finite.
        "logprobs": min(sampling.most_kept + MOST_TIES, vocabulary) if sampling.truncated else 0,
        "stop_token_ids": [*stops, *sampling.stop_ids],
        "ignore_eos": True,  # stop_token_ids already has the EOS ids
        "detokenize": False,
    }
    return {"token_ids": prompt.tolist(), "sampling_params": parameters, "cache_salt": salt}


def completion(
    answer: Mapping[str, Any], sampling: Sampling, version: int | None, *, routed_after: int | None = None
) -> Completion:
    """Build a Completion from vLLM's answer.

    `version` is the adapter's policy version and holds for all tokens. If it is None, the server gives each token's version. If the
    trainer asks for the experts of each token, `routed_after` is the number of tokens in the prompt."""
    (choice,) = answer["choices"]
    finish = choice["finish_reason"]
    if finish not in ("stop", "length"):
        raise RemoteError(
            f"vLLM ended a request with finish reason {finish!r}, but only 'stop' and 'length' are expected"
        )
    tokens = np.array(choice["token_ids"], dtype=np.int32)
    logprobs = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]], dtype=np.float32)
    if len(logprobs) != len(tokens):
        raise RemoteError(f"vLLM sent {len(tokens)} tokens with {len(logprobs)} logprobs")
    versions = (
        np.full(len(tokens), version, dtype=np.int32)
        if version is not None
        else versions_of(choice["weight_versions"], len(tokens))
    )
    if (logprobs <= _NOT_FINITE).any():
        raise TrainingDiverged.in_logits(versions.tolist()[-1])
    return Completion(
        tokens=tokens,
        logprobs=logprobs,
        policy_version=versions,
        finish=finish,
        temperature=sampling.temperature,
        truncated=sampling.truncated,
        kept=_kept(choice["logprobs"]["content"]) if sampling.truncated else None,
        experts=None if routed_after is None else routed_experts(choice, routed_after + len(tokens)),
    )


def _kept(content: Sequence[Mapping[str, Any]]) -> Kept:
    """Return the tokens with a probability at each position. Raises RemoteError if they are not all that vLLM sampled from."""
    found = [
        sorted((one["token_id"], one["logprob"]) for one in entry["top_logprobs"] if one["logprob"] > _NOT_FINITE)
        for entry in content
    ]
    flat = [one for position in found for one in position]
    sizes = np.array([len(position) for position in found], np.int32)
    mass = np.add.reduceat(np.exp([logprob for _, logprob in flat]), np.cumsum(sizes) - sizes) if flat else np.ones(0)
    if not sizes.all() or (np.abs(mass - 1) > _MASS_ROUNDING).any():
        at = int(np.abs(mass - 1).argmax()) if sizes.all() else int(sizes.argmin())
        raise RemoteError(
            f"vLLM named {sizes[at]} tokens at position {at} of a reply, and these are not all that it sampled from: more than "
            f"{MOST_TIES} tokens are as likely as the last that top_k keeps, or the server's --logprobs-mode is another.",
            remedy="Set a lower sampling.top_k.",
        )
    return Kept(sizes, np.array([token for token, _ in flat], np.int32))


def versions_of(spans: Sequence[Mapping[str, Any]] | None, count: int) -> Versions:
    """Return versions [count] from spans `{"version", "start", "end"}`, which must cover every token once."""
    versions = np.zeros(count, dtype=np.int32)
    at = 0
    for span in spans or ():
        if span["start"] != at or not at < span["end"] <= count:
            break
        try:
            versions[at : span["end"]] = int(span["version"])
        except ValueError:
            raise RemoteError(
                f"vLLM marks tokens with version {span['version']!r}, which no run has published"
            ) from None
        at = span["end"]
    if at != count:
        raise RemoteError(f"vLLM's weight_versions {spans} do not cover its {count} tokens")
    return versions


def scoring_request(sequence: Tokens, salt: str, likeliest: int = 0) -> dict[str, Any]:
    """Build a request for the logprobs of a sequence and of the `likeliest` most likely tokens at each position.

    vLLM must also sample one token after it, and does not use the prefix cache for such a request."""
    parameters = {"n": 1, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": likeliest, "detokenize": False}
    return {"token_ids": sequence.tolist(), "sampling_params": parameters, "cache_salt": salt}


def scores(answer: Mapping[str, Any], sequence: Tokens) -> Floats:
    """Return logprobs f32[T] from the answer; entry 0 is 0."""
    scored = np.zeros(len(sequence), dtype=np.float32)
    for at, (entry, token) in enumerate(zip(answer["prompt_logprobs"], sequence.tolist(), strict=True)):
        if at:
            scored[at] = entry[str(token)]["logprob"]
    return scored


def top_logprobs(answer: Mapping[str, Any], k: int) -> TopK:
    """Return the k most likely tokens of each position except the first. vLLM also sends
    the sequence's own token; it is left out if its rank is above k."""
    entries = answer["prompt_logprobs"]
    best = [
        sorted(
            (int(entry_of["rank"]), int(token), float(entry_of["logprob"]))
            for token, entry_of in (entry or {}).items()
            if at and int(entry_of["rank"]) <= k
        )
        for at, entry in enumerate(entries)
    ]
    flat = [one for position in best for one in position]
    return TopK(
        offsets_of(np.array([len(position) for position in best], np.int64)),
        np.array([token for _, token, _ in flat], np.int32),
        np.array([logprob for _, _, logprob in flat], np.float32),
    )

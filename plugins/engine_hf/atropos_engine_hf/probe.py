"""Measure which decoders are exact for an architecture, on a small copy of the model: `python -m atropos_engine_hf.probe DIRECTORY`.

Rows are decoded as in a running batch: prompts of several lengths are prefilled together and copied, rows end, others join. The logits
of each row are compared with a plain forward pass of its own sequence. Rows are longer than four of the small model's windows, and
than the chunks of 64 tokens in which some layers read a prompt.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from atropos_core.errors import FitError
from atropos_engine_hf.cohort import CohortDecoder, measured_bytes
from atropos_engine_hf.decode_path import (
    COHORT,
    EQUAL,
    LIMIT,
    MODULE,
    NAME,
    OTHER,
    SLOTS,
    DecodePath,
    choose,
    config_directory,
)
from atropos_engine_hf.decoder import Decoder, SlotDecoder
from atropos_torch_models.probes import keep, kept
from atropos_torch_models.small_model import small_model

if TYPE_CHECKING:
    from atropos_engine_hf.config import HFOptions

DECODERS: dict[str, Callable[[Any], Decoder]] = {
    SLOTS: SlotDecoder,
    COHORT: CohortDecoder,
    EQUAL: lambda model: CohortDecoder(model, equal_lengths=True),
}


class Scene(NamedTuple):
    """The rows that a decoder is tried on: the lengths of the first prompts, of those that join later, and steps before and after that."""

    prompts: Sequence[int]
    later: Sequence[int]
    before: int
    after: int


SMALL = Scene(prompts=(70, 22, 37), later=(9, 83), before=4, after=22)
REAL = Scene(prompts=(12, 20), later=(7,), before=2, after=2)
# Of the root mean square of differences, in the model's own weights in fewer than 32 bits. Rounding in bfloat16 gives up to 0.14 of the
# spread in SmolLM2-135M (float32 against bfloat16), and one foreign token 0.44 and more. A largest difference would tell less: a few of
# 50,000 logits are far off in both.
ROUNDING = 0.25


def path_of(config: Any, directory: Path, options: HFOptions) -> DecodePath:
    """Return the path for this model, measured here if no earlier measurement is kept. Raises FitError if none is exact."""
    where = config_directory(directory)
    found = kept(where, NAME, MODULE)
    if found is None:
        keep(where, NAME, MODULE, found := measure(config))
    return choose(options.decode, config.model_type, found)


def open_decoder(model: Any, path: DecodePath) -> Decoder:
    """Return the decoder, after a few rows in the model's own weights and dtype. Raises FitError if these differ from a plain forward
    pass: the engine's samples would come from another distribution."""
    kind, decoder = model.config.model_type, DECODERS[path.name](model)
    exact = model.dtype == torch.float32
    limit = LIMIT if exact else ROUNDING
    try:
        off = worst(decoder, REAL, mean=not exact)
    except Exception as error:
        raise FitError(
            f"engine 'hf' cannot decode this {kind!r} model: {type(error).__name__}: {error}", remedy=OTHER
        ) from error
    if not off <= limit:
        raise FitError(
            f"engine 'hf' does not decode this {kind!r} model exactly: with its weights ({model.dtype}), logits of a decode step differ"
            f" from a plain forward pass by {off:.2g} of their spread{'' if exact else ' on average'}, and at most {limit:g} is allowed.",
            remedy=OTHER,
        )
    return decoder


def measure(config: Any) -> dict[str, Any]:
    """Return, for each decoder, the largest difference of a logit from the plain forward pass, in parts of the logits' spread, or what
    it failed with; the number of layers of each kind; and the bytes of a row in the model's own cache, by width of an element."""
    found: dict[str, Any] = {"off": {}, "failed": {}, "layers": kinds(config), "bytes": {}}
    model = small_model(config)
    for name, make in DECODERS.items():
        if name == EQUAL and found["off"].get(COHORT, np.inf) <= LIMIT:
            continue
        try:
            found["off"][name] = worst(make(model), SMALL)
        except Exception as error:  # noqa: BLE001 - any model's own code, with caches that it was not written for
            found["failed"][name] = f"{type(error).__name__}: {error}"
    for element, dtype in ((4, torch.float32), (2, torch.bfloat16)):
        try:
            found["bytes"][str(element)] = row_bytes(config, dtype)
        except Exception as error:  # noqa: BLE001 - as above; some layers cannot compute without numbers
            found["failed"]["bytes"] = f"{type(error).__name__}: {error}"
    return found


@torch.inference_mode()
def worst(decoder: Decoder, scene: Scene, *, mean: bool = False) -> float:
    """Return the largest difference of a logit from that of a plain pass over the row's sequence, in standard deviations of the logits;
    with `mean`, the largest root mean square of those of a row.

    Leaves the decoder without rows. Afterwards it knows the bytes of a row."""
    rows = _replay(decoder, scene)
    found = 0.0
    for tokens, start, logits in rows:
        ids = torch.from_numpy(tokens[None]).to(decoder.device)
        plain = decoder.model(input_ids=ids, use_cache=False).logits[0, start : start + len(logits)].float()
        spread = (plain - plain.mean(-1, keepdim=True)).square().mean().sqrt().clamp_min(1e-12)
        apart = torch.stack(logits).float() - plain
        off = (apart.square().mean().sqrt() if mean else apart.abs().max()) / spread
        found = max(found, float(off)) if torch.isfinite(off) else float("inf")
    return found


class TriedRow(NamedTuple):
    tokens: NDArray[np.int64]
    start: int  # the position that the first logits are after
    logits: list[torch.Tensor]  # [V] each


def _replay(decoder: Decoder, scene: Scene) -> list[TriedRow]:
    """Decode given random tokens, and return the logits. Of each prompt's rows the first continues with other tokens than the second;
    one row ends after `before` steps, when the later prompts join; another ends half-way from there."""
    random = np.random.default_rng(0)
    vocabulary = decoder.model.get_input_embeddings().weight.shape[0]
    steps = scene.before + scene.after + 1
    decoder.reserve(2 * len(scene.prompts) + len(scene.later), max(*scene.prompts, *scene.later) + steps)

    def enter(lengths: Sequence[int], copies: int) -> None:
        prompts = [random.integers(0, vocabulary, length) for length in lengths]
        logits = decoder.prefill([one.astype(np.int32) for one in prompts], [copies] * len(prompts), len(present))
        for at, row in enumerate(logits):
            prompt = prompts[at // copies]
            present.append(
                TriedRow(np.concatenate([prompt, random.integers(0, vocabulary, steps)]), len(prompt) - 1, [row])
            )

    def leave(slot: int) -> None:
        ended.append(present[slot])
        to = np.arange(len(present))
        to[slot], to[-1] = -1, slot if slot < len(present) - 1 else -1
        decoder.move(to, held())
        present[slot] = present[-1]
        present.pop()

    def held() -> NDArray[np.int64]:
        return np.array([row.start + len(row.logits) for row in present])

    def step() -> None:
        lengths = held()
        tokens = np.array([row.tokens[length] for row, length in zip(present, lengths, strict=True)])
        for row, logits in zip(present, decoder.decode(tokens, lengths), strict=True):
            row.logits.append(logits)

    present: list[TriedRow] = []
    ended: list[TriedRow] = []
    enter(scene.prompts, 2)
    decoder.measure()
    for _ in range(scene.before):
        step()
    leave(0)
    enter(scene.later, 1)
    for count in range(scene.after):
        step()
        if count == scene.after // 2:
            leave(1)
    decoder.release()
    return [*ended, *present]


def kinds(config: Any) -> dict[str, int]:
    """Return the number of layers of each class in the cache that transformers makes for this configuration; empty if it makes none."""
    try:
        return dict(Counter(type(layer).__name__ for layer in DynamicCache(config=config).layers))
    except (KeyError, AttributeError, TypeError, ValueError):
        return {}


def row_bytes(config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Return the bytes of a row in the cache of the whole model, from the shapes of a pass that computes no numbers."""
    tokens = 37  # not a width of any layer
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config.get_text_config(decoder=True), dtype=dtype).eval()
        model.set_experts_implementation("batched_mm")  # the others look at numbers
        decoder = CohortDecoder(model)
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        with torch.inference_mode():
            output = model(input_ids=ids, use_cache=True)
    cache = output.cache_params if "cache_params" in decoder.takes else output.past_key_values
    return measured_bytes(cache, tokens).record()


def main() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    config = AutoConfig.from_pretrained(Path(sys.argv[1]), local_files_only=True, trust_remote_code=False)
    sys.stdout.write(json.dumps(measure(config)) + "\n")


if __name__ == "__main__":
    main()

"""Measure which layouts are exact for a model, on a small copy: `python -m atropos_trainer_grpo.layout_probe DIRECTORY`.

Each way of `layouts.WAYS` scores sequences as a step does, and takes the gradient of a weighted sum of their logprobs. The reference is
the model's plain forward pass, one sequence at a time. Sequences are longer than four windows or chunks of the copy, and longer than the
chunk of 64 tokens in which linear attention computes; some share a beginning, as completions of one prompt do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from atropos_core.errors import FitError
from atropos_torch_models.probes import keep, kept
from atropos_torch_models.small_model import small_model
from atropos_trainer_grpo.attention import NAME, register
from atropos_trainer_grpo.layouts import MODULE, PACKED, PROBE, REPLAY, WAYS, Layout, chosen, way
from atropos_trainer_grpo.model import config_of, lay_out, neutral, score, vocabulary_of
from atropos_trainer_grpo.packed_rows import pack
from atropos_trainer_grpo.padded_rows import pad
from atropos_trainer_grpo.router_replay import difference

if TYPE_CHECKING:
    from atropos_trainer_grpo.config import GrpoOptions

SHARED, LENGTHS = 40, (90, 70, 37, 22)  # tokens: the first two begin alike
OTHERS = 8  # further tokens whose logprobs are compared at each position


def layout_in_process(directory: Path, options: GrpoOptions) -> Layout:
    """Return what `layout_of` does, measured in this process if it is not known yet. Raises FitError."""
    if not (directory / "config.json").is_file():
        return PACKED  # what opens it says what is wrong
    found = kept(directory, PROBE, MODULE)
    if found is None:
        found = measured(directory)
        keep(directory, PROBE, MODULE, found)
    return chosen(found, directory, options)


def measured(directory: Path) -> dict[str, Any]:
    """Return what `compared` does for a small copy of the model in this directory, with its type and the kinds of its layers; or the error
    and the remedy for a model that is refused as a whole."""
    try:
        config = config_of(directory)
    except FitError as error:
        return {"refused": str(error).splitlines()[0], "remedy": error.remedy}
    decoder = config.get_text_config(decoder=True)
    kinds = getattr(decoder, "layer_types", None) or getattr(decoder, "layers_block_type", None) or [decoder.model_type]
    plain = small_model(config)  # as it is sampled
    model = small_model(neutral(config))
    eager = model.config._attn_implementation == "eager"
    return {
        "model_type": str(config.model_type),
        "layers": sorted({str(kind) for kind in kinds}),
        "eager_heads": int(getattr(decoder, "num_attention_heads", 0) or 0) if eager else 0,
        **compared(model, plain),
        REPLAY: difference(model),
    }


def compared(model: Any, plain: Any = None) -> dict[str, float | str]:
    """Return by way the largest difference to single sequences: of logprobs in units of their spread, or of the gradient in units of its
    norm; or, as text, why it cannot be computed. `plain` is the model as it is sampled, if that is another."""
    register()
    inputs = _Inputs(vocabulary_of(model))
    values, gradient = inputs.of_single(model if plain is None else plain)
    attention = model.config._attn_implementation
    found: dict[str, float | str] = {}
    for name, own_logits in WAYS:
        try:
            lay_out(model, Layout(name, own_logits))
            model.set_attn_implementation(NAME if name == "packed" else attention)
            made, slope = inputs.of(model, name)
        except FitError as error:
            found[way(name, own_logits)] = str(error).rstrip(".")
            continue
        except Exception as error:  # noqa: BLE001 - the model's own code: what it raises is the result
            found[way(name, own_logits)] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            continue
        spread = float(values.std())
        apart = max(float((made - values).abs().max()) / spread, float((slope - gradient).norm() / gradient.norm()))
        found[way(name, own_logits)] = apart if np.isfinite(apart) else float("inf")
    return found


class _Inputs:
    """Sequences of random tokens, the further tokens that are scored, and the weights of the sum whose gradient is taken."""

    def __init__(self, vocabulary: int) -> None:
        random = np.random.default_rng(0)
        rows = [random.integers(3, vocabulary, length) for length in LENGTHS]
        rows[1][:SHARED] = rows[0][:SHARED]
        self.tokens = np.concatenate(rows).astype(np.int32)
        self.lengths = np.array(LENGTHS, np.int64)
        starts = np.cumsum(self.lengths) - self.lengths
        self.scored = np.setdiff1d(np.arange(len(self.tokens)), starts)
        count = len(self.scored)
        self.others = torch.from_numpy(random.integers(0, vocabulary, (count, OTHERS)))
        self.weights = torch.from_numpy(random.normal(size=(count, 1 + OTHERS))).float()

    def of_single(self, model: Any) -> tuple[Tensor, Tensor]:
        """[R, 1 + OTHERS] logprobs of one sequence at a time, and the gradient."""
        made, begin = [], 0
        for row in np.split(self.tokens.astype(np.int64), np.cumsum(self.lengths)[:-1]):
            logits = model(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0, :-1].float()
            each = torch.cat([torch.from_numpy(row[1:])[:, None], self.others[begin : begin + len(row) - 1]], dim=1)
            made.append(torch.log_softmax(logits, dim=-1).gather(1, each))
            begin += len(row) - 1
        return self._with_gradient(model, torch.cat(made))

    def of(self, model: Any, layout: str) -> tuple[Tensor, Tensor]:
        """The same by a layout."""
        laid_out: Any = (
            pack(self.tokens, self.lengths, share=True) if layout == "packed" else pad(self.tokens, self.lengths)
        )
        targets = torch.from_numpy(self.tokens[self.scored].astype(np.int64))
        scored = score(model, laid_out, laid_out.at(self.scored - 1), targets, None, 64, self.others)
        assert scored.others is not None
        return self._with_gradient(model, torch.cat([scored.logprobs[:, None], scored.others], dim=1))

    def _with_gradient(self, model: Any, values: Tensor) -> tuple[Tensor, Tensor]:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad((values * self.weights).sum(), parameters, allow_unused=True)
        flat = [
            torch.zeros_like(parameter) if one is None else one
            for parameter, one in zip(parameters, gradients, strict=True)
        ]
        return values.detach(), torch.cat([one.flatten() for one in flat])


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(measured(Path(sys.argv[1]))) + "\n")

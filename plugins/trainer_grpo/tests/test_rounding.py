"""The effect of rounding on logprobs, as the trainer measures it and compared with float64."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def exact(directory, sequences) -> list[np.ndarray]:
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    made = []
    with torch.no_grad():
        for one in sequences:
            ids = torch.from_numpy(one.astype(np.int64))[None]
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            made.append(np.concatenate([[0.0], logprobs.numpy()]))
    return made


@pytest.mark.parametrize(("spread", "layers"), [(0.02, 2), (0.3, 4), (0.6, 4)])
async def test_the_measured_rounding_is_what_float32_loses_against_float64(
    open_trainer, model_of, tmp_path, spread, layers
):
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=layers, initializer_range=spread))
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_of("llama") / name).read_bytes())
    trainer = await open_trainer(model=tmp_path)
    sequences = [np.random.default_rng(i).integers(2, 37, 90).astype(np.int32) for i in range(6)]
    before, state = await trainer.logprobs(sequences), torch.get_rng_state()
    measured = await trainer.rounding(sequences)
    lost = max(np.abs(a - b).max() for a, b in zip(before, exact(tmp_path, sequences), strict=True))
    assert lost / 4 < measured < lost * 4
    assert (spread, lost > 1e-4) != (0.6, False), "or no bound of 1e-4 is in question"
    assert torch.equal(state, torch.get_rng_state())
    assert measured == await trainer.rounding(sequences)
    for one, again in zip(before, await trainer.logprobs(sequences), strict=True):
        np.testing.assert_array_equal(one, again)

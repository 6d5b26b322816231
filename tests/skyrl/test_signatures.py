"""SkyRL's forms are recognised by signatures: what was published as 0.3.0 and what came after it both call themselves 0.3.0."""

from __future__ import annotations

import pytest

pytest.importorskip("skyrl", reason="needs SkyRL, in an environment of its own: `make test-skyrl`")

from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.utils.tok import get_tokenizer

from atropos_adapter_skyrl.rows import output_of
from atropos_adapter_skyrl.signatures import batch_tensors, form, unknown
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.errors import DataError

COLUMNS = [[1, 2], [3]], [[4], [5, 6]], [[1.0], [0.0, 2.0]], [[1], [0, 1]], [[-0.5], [0.0, -0.25]]


def test_rows_become_tensors_in_whichever_form_skyrl_has():
    tokenizer = get_tokenizer(str(TOY_MODEL), padding_side="left")
    sequences, attention, mask, rewards, trained, logprobs, *_ = batch_tensors(
        convert_prompts_responses_to_batch_tensors, tokenizer, *COLUMNS
    )
    assert sequences.tolist() == [[1, 2, 4], [3, 5, 6]] and attention.all()
    assert mask.tolist() == [[0, 1], [1, 1]] and trained.tolist() == [[0, 1], [0, 1]]
    assert rewards.tolist() == [[0, 1], [0, 2]] and logprobs.tolist() == [[0, -0.5], [0, -0.25]]


@pytest.mark.parametrize("name", ["tokenizer", "pad_token_id"])
def test_both_known_forms_are_given_what_they_take(name):
    tokenizer = get_tokenizer(str(TOY_MODEL), padding_side="left")
    known: dict = {}
    exec(f"def convert({name}, *columns): return {name}, columns", known)
    first, columns = batch_tensors(known["convert"], tokenizer, *COLUMNS)
    assert first is tokenizer if name == "tokenizer" else first == tokenizer.pad_token_id
    assert columns == COLUMNS


def test_a_third_form_is_named():
    def convert(collator, prompts, responses):
        raise AssertionError("nobody calls this")

    with pytest.raises(DataError, match=r"takes 'collator' first; known are tokenizer and pad_token_id"):
        batch_tensors(convert, get_tokenizer(str(TOY_MODEL), padding_side="left"), *COLUMNS)


def test_nothing_of_this_skyrl_is_unknown_and_a_field_that_nobody_fills_is_named():
    ours = output_of([], [], [], step_wise=True, own_advantages=False)
    assert unknown(ours) == []
    del ours["env_metrics"]
    assert unknown(ours) == ["GeneratorOutput.env_metrics stays empty"]
    assert "0.3.0" in form()


def test_a_function_that_takes_something_else_is_named(monkeypatch):
    from skyrl.train.generators import utils

    def prepare_generator_input(
        prompts, how_many, sampling_params, default_env_class, training_phase, global_step, extra
    ):
        raise AssertionError("nobody calls this")

    monkeypatch.setattr(utils, "prepare_generator_input", prepare_generator_input)
    [printed] = unknown(output_of([], [], [], step_wise=True, own_advantages=False))
    assert printed.startswith("prepare_generator_input takes prompts, how_many") and printed.endswith("extra")

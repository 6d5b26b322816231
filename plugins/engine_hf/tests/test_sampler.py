"""The sampler against exact probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atropos_engine_hf.sampler import BLOCK, SampledRows, Settings, choose, uniforms

P = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
CRITICAL = {4: 18.47, 2: 13.82, 3: 16.27}  # chi-square, one in a thousand, by degrees of freedom


def draw(
    rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, p: np.ndarray = P
) -> SampledRows:
    logits = torch.from_numpy(np.log(p)).float().expand(rows, -1)
    uniform = np.array([uniforms(seed, 0)[0] for seed in range(rows)])
    return choose(logits, Settings(uniform, *(np.full(rows, value) for value in (temperature, top_p, top_k, min_p))))


def whole(rows: int) -> tuple[np.ndarray, ...]:
    """Temperature, top_p, top_k and min_p of rows that keep all."""
    return np.ones(rows), np.ones(rows), np.zeros(rows, np.int64), np.zeros(rows)


def chi_square(tokens: np.ndarray, expected: np.ndarray) -> float:
    counts = np.bincount(tokens, minlength=len(expected))
    assert not counts[expected == 0].any()
    expected = expected[expected > 0] * len(tokens)
    return float(((counts[counts > 0] - expected) ** 2 / expected).sum())


def test_many_seeds_draw_the_exact_distribution() -> None:
    tokens, logprobs, _ = draw(20_000)
    assert chi_square(tokens, P) < CRITICAL[4]
    np.testing.assert_allclose(logprobs, np.log(P)[tokens], atol=1e-6)


def test_temperature_sharpens_the_distribution_exactly() -> None:
    sharp = P**2 / (P**2).sum()
    tokens, logprobs, _ = draw(20_000, temperature=0.5)
    assert chi_square(tokens, sharp) < CRITICAL[4]
    np.testing.assert_allclose(logprobs, np.log(sharp)[tokens], atol=1e-6)


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ({"top_k": 3}, 3),
        ({"top_p": 0.9}, 4),
        ({"top_p": 0.7, "top_k": 4}, 2),
        ({"min_p": 0.25}, 3),  # at least an eighth of all
        ({"min_p": 0.25, "top_k": 2}, 2),
        ({"min_p": 0.15, "top_p": 0.95}, 4),  # 0.9 of the 0.95 that min_p leaves is not enough
        ({"temperature": 0.5, "top_p": 0.9}, 3),  # of p squared: 0.77, 0.12, 0.07
    ],
    ids=str,
)
def test_a_cut_draws_from_what_it_keeps_and_says_what_that_is(cut: dict[str, float], kept: int) -> None:
    tempered = P ** (1 / cut.get("temperature", 1.0))
    expected = np.where(np.arange(5) < kept, tempered, 0) / tempered[:kept].sum()
    tokens, logprobs, ids = draw(20_000, **cut)
    if kept > 2:
        assert chi_square(tokens, expected) < CRITICAL[kept - 1]
    assert set(tokens) == set(range(kept))
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-6)
    assert all(one.tolist() == list(range(kept)) and one.dtype == np.int32 for one in ids)


def test_of_equally_likely_tokens_at_the_boundary_the_first_are_kept() -> None:
    even = np.full(5, 0.2)
    for cut, kept in (({"top_k": 2}, 2), ({"top_p": 0.5}, 3), ({"min_p": 1.0}, 5)):
        tokens, logprobs, ids = draw(3_000, p=even, **cut)
        assert set(tokens) == set(range(kept)) and ids[0].tolist() == list(range(kept))
        np.testing.assert_allclose(logprobs, -np.log(kept), atol=1e-6)


def test_a_set_of_one_token_is_certain() -> None:
    tokens, logprobs, ids = draw(100, top_p=1e-9)
    assert not tokens.any() and not logprobs.any() and all(one.tolist() == [0] for one in ids)


def test_rows_that_cut_nothing_say_nothing_beside_rows_that_do() -> None:
    logits = torch.from_numpy(np.log(P)).float().expand(3, -1)
    top_k = np.array([0, 2, 0])
    _, logprobs, ids = choose(logits, Settings(np.array([0.99, 0.0, 0.0]), np.ones(3), np.ones(3), top_k, np.zeros(3)))
    assert ids[0] is None and ids[2] is None and ids[1].tolist() == [0, 1]
    np.testing.assert_allclose(logprobs, np.log([0.05, 0.5 / 0.7, 0.5]), atol=1e-6)


def test_positions_of_one_seed_are_independent_draws() -> None:
    uniform = np.concatenate([uniforms(12345, block) for block in range(40)])
    logits = torch.from_numpy(np.log(P)).float().expand(len(uniform), -1)
    tokens, *_ = choose(logits, Settings(uniform, *whole(len(uniform))))
    assert chi_square(tokens, P) < CRITICAL[4]
    pairs = tokens[:-1] * 5 + tokens[1:]
    assert chi_square(pairs, np.outer(P, P).ravel()) < 51.2  # 24 degrees of freedom, one in a thousand


def test_blocks_of_uniforms_continue_one_philox_stream() -> None:
    stream = np.random.Generator(np.random.Philox(key=7)).random(3 * BLOCK)
    np.testing.assert_array_equal(np.concatenate([uniforms(7, block) for block in range(3)]), stream)


def test_a_row_draws_the_same_beside_rows_with_other_settings() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 300, generator=generator)
    uniform = np.random.default_rng(0).random(40)
    temperature = np.where(np.arange(40) % 3 == 0, 0.0, 1.0 + np.arange(40) / 40)
    top_p, top_k = np.where(np.arange(40) % 2, 0.8, 1.0), np.where(np.arange(40) % 5, 0, 12)
    min_p = np.where(np.arange(40) % 7, 0.0, 0.2)
    given = Settings(uniform, temperature, top_p, top_k, min_p)
    together = choose(logits, given)
    for row in range(40):
        one = slice(row, row + 1)
        alone = choose(logits[one], Settings(*(values[one] for values in given)))
        assert (alone[0][0], alone[1][0]) == (together[0][row], together[1][row])
        ours, theirs = alone.kept[0], together.kept[row]
        assert (ours is None and theirs is None) or ours.tolist() == theirs.tolist()


def test_the_ends_of_the_unit_interval_pick_tokens_that_can_be_picked() -> None:
    logits = torch.full((2, 6), -torch.inf)
    logits[:, 2:4] = 0.0
    tokens, logprobs, _ = choose(logits, Settings(np.array([0.0, np.nextafter(1.0, 0.0)]), *whole(2)))
    assert tokens.tolist() == [2, 3]
    np.testing.assert_allclose(logprobs, np.log(0.5))

"""The sampler against exact probabilities."""

from __future__ import annotations

import numpy as np
import torch

from atropos_engine_hf.sampler import BLOCK, choose, uniforms

P = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
CRITICAL = {4: 18.47, 2: 13.82, 3: 16.27}  # chi-square, one in a thousand, by degrees of freedom


def draw(rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> tuple[np.ndarray, np.ndarray]:
    logits = torch.from_numpy(np.log(P)).float().expand(rows, -1)
    uniform = np.array([uniforms(seed, 0)[0] for seed in range(rows)])
    full = [np.full(rows, value) for value in (temperature, top_p)]
    return choose(logits, uniform, *full, np.full(rows, top_k))


def chi_square(tokens: np.ndarray, expected: np.ndarray) -> float:
    counts = np.bincount(tokens, minlength=len(expected))
    assert not counts[expected == 0].any()
    expected = expected[expected > 0] * len(tokens)
    return float(((counts[counts > 0] - expected) ** 2 / expected).sum())


def test_many_seeds_draw_the_exact_distribution() -> None:
    tokens, logprobs = draw(20_000)
    assert chi_square(tokens, P) < CRITICAL[4]
    np.testing.assert_allclose(logprobs, np.log(P)[tokens], atol=1e-6)


def test_temperature_sharpens_the_distribution_exactly() -> None:
    sharp = P**2 / (P**2).sum()
    tokens, logprobs = draw(20_000, temperature=0.5)
    assert chi_square(tokens, sharp) < CRITICAL[4]
    np.testing.assert_allclose(logprobs, np.log(sharp)[tokens], atol=1e-6)


def test_top_k_and_top_p_draw_from_what_is_kept() -> None:
    for cut, kept in ({"top_k": 3}, 3), ({"top_p": 0.9}, 4), ({"top_p": 0.7, "top_k": 4}, 2):
        expected = np.where(np.arange(5) < kept, P, 0) / P[:kept].sum()
        tokens, logprobs = draw(20_000, **cut)
        if kept > 2:
            assert chi_square(tokens, expected) < CRITICAL[kept - 1]
        assert set(tokens) == set(range(kept))
        np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-6)


def test_positions_of_one_seed_are_independent_draws() -> None:
    uniform = np.concatenate([uniforms(12345, block) for block in range(40)])
    logits = torch.from_numpy(np.log(P)).float().expand(len(uniform), -1)
    ones = np.ones(len(uniform))
    tokens, _ = choose(logits, uniform, ones, ones, np.zeros(len(uniform), np.int64))
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
    together = choose(logits, uniform, temperature, top_p, top_k)
    for row in range(40):
        one = slice(row, row + 1)
        alone = choose(logits[one], uniform[one], temperature[one], top_p[one], top_k[one])
        assert (alone[0][0], alone[1][0]) == (together[0][row], together[1][row])


def test_the_ends_of_the_unit_interval_pick_tokens_that_can_be_picked() -> None:
    logits = torch.full((2, 6), -torch.inf)
    logits[:, 2:4] = 0.0
    ones = np.ones(2)
    tokens, logprobs = choose(logits, np.array([0.0, np.nextafter(1.0, 0.0)]), ones, ones, np.zeros(2, np.int64))
    assert tokens.tolist() == [2, 3]
    np.testing.assert_allclose(logprobs, np.log(0.5))

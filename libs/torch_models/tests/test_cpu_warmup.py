"""`warm_up` calls every function that it names, and changes nothing else. That it helps is shown by benchmarks.first_calls."""

from __future__ import annotations

import numpy as np
import torch

from atropos_torch_models.cpu_warmup import FUNCTIONS, warm_up


def test_it_names_functions_that_torch_computes_as_numpy_does():
    values = np.linspace(0.1, 0.9, 5000)
    for name in FUNCTIONS:
        theirs = getattr(np, name, None) or getattr(np, name.replace("a", "arc", 1), None)
        found = getattr(torch, name)(torch.from_numpy(values)).numpy()
        if theirs is not None:  # not erf and erfc
            np.testing.assert_allclose(found, theirs(values), rtol=1e-12)


def test_it_leaves_threads_and_random_states_alone():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    warm_up()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_each_function_is_called_for_both_widths(monkeypatch):
    called = []

    def noted(name, real):
        return lambda one: called.append((name, one.dtype, one.numel())) or real(one)

    for name in FUNCTIONS:
        monkeypatch.setattr(torch, name, noted(name, getattr(torch, name)))
    warm_up()
    assert sorted(called, key=str) == sorted(
        ((name, dtype, 1) for name in FUNCTIONS for dtype in (torch.float32, torch.float64)), key=str
    )

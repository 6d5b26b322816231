"""`settle` calls every function that it names, and changes nothing else. That it helps is shown by benchmarks.first_calls."""

from __future__ import annotations

import numpy as np
import torch

from atropos_core.first_calls import FUNCTIONS, settle


def test_it_names_functions_that_torch_computes_as_numpy_does():
    values = np.linspace(0.1, 0.9, 5000)
    for name in FUNCTIONS:
        theirs = getattr(np, name, None) or getattr(np, name.replace("a", "arc", 1), None)
        found = getattr(torch, name)(torch.from_numpy(values)).numpy()
        if theirs is not None:  # not erf and erfc
            np.testing.assert_allclose(found, theirs(values), rtol=1e-12)


def test_it_leaves_threads_and_random_states_alone():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    settle(torch)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)

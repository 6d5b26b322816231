"""Read priors into banks: as many as requested at the start, and a few more with each settled draw."""

from __future__ import annotations

import numpy as np

from atropos_core.interfaces import TaskSource
from atropos_curriculum.bank import Bank
from atropos_curriculum.config import Prior
from atropos_curriculum.priors import bins_of, from_field, from_file, inner_edges, spread, success_of_bins

AT_ONCE = 1 << 20  # numbers of a file to read at once, and the most from which its bins are computed


def read_prior(prior: Prior, name: str, source: TaskSource, bank: Bank, *, anew: bool) -> None:
    """Read a whole file, or a field of as many tasks as `prior.read` says, spread over all of them. If the bank already has bins
    (from a checkpoint), they stay. A field is then read again only if `anew`, because the tasks have changed."""
    if prior.file is not None:
        numbers = from_file(prior, name, source.size)
        values = np.asarray(numbers[spread(source.size, 0, AT_ONCE)], np.float64)
        edges = inner_edges(values, prior.bins) if bank.edges is None else bank.edges
        groups = np.empty(source.size, np.uint8)
        for at in range(0, source.size, AT_ONCE):
            groups[at : at + AT_ONCE] = bins_of(np.asarray(numbers[at : at + AT_ONCE], np.float64), edges)
        bank.place(np.arange(source.size), groups)
    else:
        if bank.edges is not None and not anew:
            return
        indices = spread(source.size, 0, source.size if prior.read == "all" else prior.read)
        values = from_field(prior, name, source.tasks, indices)
        edges = inner_edges(values, prior.bins) if bank.edges is None else bank.edges
        bank.place(indices, bins_of(values, edges))
        bank.read = len(indices)
    if bank.edges is None:
        bank.edges = edges
        bank.guess(success_of_bins(values, edges, prior.meaning))


def read_ahead(prior: Prior, name: str, source: TaskSource, bank: Bank) -> None:
    """Read the field of some further tasks."""
    if prior.field is None or bank.read >= source.size or not prior.read_ahead:
        return
    indices = spread(source.size, bank.read, prior.read_ahead)
    assert bank.edges is not None, "the first were read when the environment opened"
    bank.place(indices, bins_of(from_field(prior, name, source.tasks, indices), bank.edges))
    bank.read += len(indices)

"""A module of the contract v1."""

import verifiers.v1 as vf


class Sums(vf.Taskset):
    """Its tasks are loaded by verifiers 0.4 or newer."""

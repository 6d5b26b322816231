"""Fixtures of the tests of commands."""

from tests.conftest import atropos

__all__ = ["atropos"]

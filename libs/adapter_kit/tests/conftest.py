"""Fixtures of the tests of commands."""

from tests.conftest import atropos, sevens

__all__ = ["atropos", "sevens"]

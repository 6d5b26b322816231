"""Fixtures for the tests of commands."""

from __future__ import annotations

from tests.conftest import atropos as atropos

"""What the tests of commands start."""

from __future__ import annotations

from tests.conftest import atropos as atropos

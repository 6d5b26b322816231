"""The command line as a user has it."""

from tests.conftest import atropos as atropos

"""Environments of verifiers, of either of its contracts, trained on the calls that their own clients make."""

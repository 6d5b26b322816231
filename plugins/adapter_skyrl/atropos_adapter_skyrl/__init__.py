"""Environments of Atropos inside SkyRL."""

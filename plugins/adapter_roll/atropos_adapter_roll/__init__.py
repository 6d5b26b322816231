"""Environments of Atropos as `gem.Env`, for ROLL and for gem itself."""

"""Curricula that learn from outcomes: which tasks are worth their rollouts now."""

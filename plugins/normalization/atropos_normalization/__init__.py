"""Rewards by their running mean and deviation, and rewards that count the length of a reply."""

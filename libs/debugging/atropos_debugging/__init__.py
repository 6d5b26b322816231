"""Questions to recorded runs: score their rollouts again, find the first difference between two runs, and train a step again."""

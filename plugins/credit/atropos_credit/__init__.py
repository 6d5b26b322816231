"""Advantages for each turn of an episode, and a kit that measures the bias of any advantage estimator."""

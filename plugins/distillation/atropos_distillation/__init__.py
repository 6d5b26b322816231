"""Teachers: a larger model, or the policy itself with more to read."""

"""A teacher that annotates groups with the logprobs of its own model."""

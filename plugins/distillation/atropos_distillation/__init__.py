"""A teacher that annotates groups with its model's logprobs."""

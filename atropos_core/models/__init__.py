"""Read facts about a model from its directory, and warm up torch on a CPU."""

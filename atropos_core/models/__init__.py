"""Read facts about a model from its directory."""

"""Several rewards as one, with their agreement measured; and a reward that asks a model for its judgement."""

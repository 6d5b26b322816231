"""A bridge without a copy: the trainer's parameters are views of the engine's."""

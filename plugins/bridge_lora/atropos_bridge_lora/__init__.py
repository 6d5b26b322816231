"""A bridge that moves LoRA adapters from the trainer into running engines."""

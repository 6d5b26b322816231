"""Run files for real models, one per situation, and the command that lists them."""

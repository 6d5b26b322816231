"""A policy-gradient trainer: GRPO, Dr.GRPO and DAPO on packed sequences, in one process."""

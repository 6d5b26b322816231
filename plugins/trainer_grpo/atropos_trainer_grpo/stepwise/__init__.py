"""`StepwiseTrainer` for the trainer `grpo`: adapters of clients, trained call by call over the run's own frozen base model."""

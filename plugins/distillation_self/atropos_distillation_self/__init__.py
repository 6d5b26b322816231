"""Self-distillation: the policy, shown what came of a group's attempts, is the teacher of the rollouts that it made without it."""

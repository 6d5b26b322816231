"""Self-distillation: the policy teaches its own rollouts, after it has been shown the results of the group's attempts."""

"""The bounded queue of scored groups between rollouts and the trainer."""

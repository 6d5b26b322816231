"""Evolution strategies: a trainer that perturbs weights and looks at rewards, without a backward pass."""

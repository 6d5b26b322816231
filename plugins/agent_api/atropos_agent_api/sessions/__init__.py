"""A session is one episode of an agent: a policy, a token tree and their limits."""

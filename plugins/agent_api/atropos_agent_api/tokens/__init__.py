"""From messages to stored ids and back: the token tree of an episode, and the formats of model families."""

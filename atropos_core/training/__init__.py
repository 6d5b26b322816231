"""The loop and its step: pack, train, publish, measure, and the state that a checkpoint holds in addition to the weights."""

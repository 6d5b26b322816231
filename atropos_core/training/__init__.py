"""The loop and its step: pack, train, publish, measure, and what a checkpoint holds beside the weights."""

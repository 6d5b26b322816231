"""A bridge that broadcasts the trainer's weights to every engine, from memory to memory."""

BROKE_OFF = "a broadcast of weights broke off"  # what an end says that misses another

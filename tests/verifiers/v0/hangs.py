"""It waits for something that does not come."""

import time


def load_environment():
    time.sleep(600)

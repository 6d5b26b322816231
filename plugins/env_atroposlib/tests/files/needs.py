"""A file that imports what is not there."""

import surely_not_there

print(surely_not_there)

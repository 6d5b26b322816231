"""A file that imports what the package that is there does not have."""

import json.surely_not_there

print(json.surely_not_there)

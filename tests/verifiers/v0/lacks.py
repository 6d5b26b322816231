"""It needs what is not installed."""

import a_package_that_nobody_has  # noqa: F401

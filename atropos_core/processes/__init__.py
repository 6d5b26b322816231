"""Components in child processes, and the calls to them."""

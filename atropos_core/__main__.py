"""`python -m atropos_core` is `atropos`."""

from atropos_core.cli import main

if __name__ == "__main__":
    main()

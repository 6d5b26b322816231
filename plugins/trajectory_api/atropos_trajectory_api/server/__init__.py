"""`atropos serve`: connections, limits, access, the hub behind them, and what it reports."""

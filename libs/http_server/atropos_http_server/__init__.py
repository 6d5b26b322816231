"""The base of all our HTTP servers: limits on connections, heads, bodies and silent clients."""

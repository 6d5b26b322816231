"""What every HTTP server of ours stands on: bounds on connections, heads, bodies and silent clients, whatever is served."""

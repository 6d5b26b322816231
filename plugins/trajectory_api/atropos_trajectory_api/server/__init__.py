"""The process of `atropos serve`: its socket, its application of all endpoints, its metrics."""

"""`atropos view`: runs as a page."""

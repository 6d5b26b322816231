"""Any environment of gem, by id."""

"""An engine over HTTP, for runs on other machines."""

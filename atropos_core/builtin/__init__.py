"""Components that need only numpy, registered through an entry point like those of other plugins."""

"""Components that need nothing but numpy, registered through the same entry point as anyone's."""

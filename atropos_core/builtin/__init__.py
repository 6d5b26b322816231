"""Components that need nothing but numpy, registered through the same door as anyone's."""

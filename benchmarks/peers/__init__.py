"""The same training step recorded by this library and by others, each in an environment of its own."""

"""The run folder, written: append-only and crash-safe."""

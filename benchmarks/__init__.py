"""Speed, memory, sketch error and the real-model runs; `python -m benchmarks` prints the quick ones."""

"""The recorder: one training run followed step by step."""

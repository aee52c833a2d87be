"""The embedding matrix: made from texts, read, checked and kept."""

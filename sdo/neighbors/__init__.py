"""Nearest rows by cosine, the same on every machine."""

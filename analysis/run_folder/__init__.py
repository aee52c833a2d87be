"""Run folders, read as arrays and tables."""

"""What ``sdo demo`` is made of: a data set, a small model, a folder and a summary."""

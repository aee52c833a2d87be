"""What the training commands share: the run file, the data and the trainer."""

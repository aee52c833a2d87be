"""What an organizer's batches would do to the gradients, asked before training."""

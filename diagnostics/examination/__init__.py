"""What recording a run would give and cost, found out without training."""

"""How often each sample is seen."""

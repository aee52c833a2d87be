"""How well gradients agree: between steps, and within a batch."""

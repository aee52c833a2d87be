"""Gradients as short vectors that keep their cosines."""

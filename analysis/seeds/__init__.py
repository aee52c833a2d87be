"""What a difference between two kinds of run is worth over several seeds."""

"""What each mini-batch holds: organizers and their plans."""

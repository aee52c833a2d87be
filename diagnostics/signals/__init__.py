"""Which gradient is meant, and how it is caught."""

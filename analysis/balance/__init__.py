"""How evenly correctness is spread over clusters of questions."""

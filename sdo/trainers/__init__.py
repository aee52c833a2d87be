"""How an organizer and a recorder reach a trainer."""

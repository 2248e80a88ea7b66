"""Data sets of others and of the user, weights of others, publishing."""

"""What a machine has, and what is left over on it."""

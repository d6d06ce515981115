"""What only a group over several machines needs."""

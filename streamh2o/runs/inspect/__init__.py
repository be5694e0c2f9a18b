"""What the cache kept of a text."""

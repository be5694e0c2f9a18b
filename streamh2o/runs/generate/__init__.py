"""Text written without end."""

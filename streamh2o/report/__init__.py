"""What people look at: the live display, tables, and pictures."""

"""A run saved in a folder, to go on after whatever happens."""

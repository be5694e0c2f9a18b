"""The CPU engine: faster stand-ins for the modules of a model, off or on as a whole."""

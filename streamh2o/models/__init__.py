"""Finding, loading and proving a model."""

"""A chunk of a text through a model."""

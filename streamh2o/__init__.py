"""Stream texts of any length through a causal language model with a KV cache of fixed size."""

__version__ = "0.1.0"

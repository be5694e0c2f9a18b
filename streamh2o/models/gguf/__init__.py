"""What reads GGUF files."""

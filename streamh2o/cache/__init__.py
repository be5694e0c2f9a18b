"""Slots, positions and eviction."""

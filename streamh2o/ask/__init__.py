"""Answers to questions about a long text."""

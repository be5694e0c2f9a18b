"""Facts planted in a long text, and what is found of them."""

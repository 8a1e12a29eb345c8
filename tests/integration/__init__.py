"""Several real services together."""

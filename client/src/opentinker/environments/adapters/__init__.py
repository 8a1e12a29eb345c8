"""Environments of other libraries, each imported with its library only."""

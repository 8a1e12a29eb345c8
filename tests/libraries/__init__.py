"""Environments on libraries that have virtual environments of their own."""

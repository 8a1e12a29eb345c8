"""Adapters: SQL, processes, models."""

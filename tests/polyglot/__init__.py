"""Clients in other languages, generated from the same protos."""

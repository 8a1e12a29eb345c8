"""Completions: how they are asked for, named, received and acknowledged."""

"""The inference service: completions of named policy versions."""

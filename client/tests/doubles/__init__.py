"""Doubles of the services behind the same protos, and a tiny tokenizer: real gRPC, nothing behind it."""

"""What the wire promises, checked on the proto files themselves."""

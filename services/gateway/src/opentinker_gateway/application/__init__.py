"""What a request does, above HTTP and below it the ports."""

"""One short method for each RPC: message to domain, domain to message."""

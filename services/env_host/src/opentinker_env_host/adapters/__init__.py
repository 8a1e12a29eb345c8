"""What env_host is joined to: worker processes, the event bus."""

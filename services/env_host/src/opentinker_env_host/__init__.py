"""The environment host: one worker process per episode."""

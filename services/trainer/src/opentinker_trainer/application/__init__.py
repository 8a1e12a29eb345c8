"""What the front does: admits, logs, runs, publishes and restores."""

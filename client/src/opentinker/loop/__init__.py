"""`fit()` and what belongs to it: evaluation, metrics, loggers, progress."""

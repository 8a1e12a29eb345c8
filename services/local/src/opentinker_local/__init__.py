"""The embedded stack: every service on one machine, under one supervisor."""

"""Models under names: deployments, and talking to whatever a name stands for."""

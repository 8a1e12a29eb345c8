"""From tasks to trajectories: the agent loop and the groups it plays."""

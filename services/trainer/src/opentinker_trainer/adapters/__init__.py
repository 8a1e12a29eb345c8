"""The trainer's ports, on real things: the engine child, the object store, the scheduler."""

"""HTTP: one short function for each route."""

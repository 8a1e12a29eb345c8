"""Rules of the trainer; knows no wire, no storage and no model library."""

"""Supervised fine-tuning: from rows of a data set to a policy that has learned from them."""

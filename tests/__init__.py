"""Tests that cross the parts; what tests one part lies beside it."""

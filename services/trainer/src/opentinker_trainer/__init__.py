"""The trainer: one base model, many policies, operations in strict order."""

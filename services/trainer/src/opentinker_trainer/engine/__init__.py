"""What runs in engine children: the only modules of the trainer that import torch."""

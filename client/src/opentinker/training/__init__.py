"""What a policy learns from and by: train samples, losses, optimizers, the operation channel."""

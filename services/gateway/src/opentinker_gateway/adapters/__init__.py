"""The scheduler and the inference servers, over gRPC."""

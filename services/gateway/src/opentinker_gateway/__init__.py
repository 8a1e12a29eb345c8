"""The gateway: OpenAI's HTTP API over every model, policy and deployment of a cluster."""

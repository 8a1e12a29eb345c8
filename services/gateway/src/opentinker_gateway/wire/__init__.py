"""Between OpenAI's JSON, the protos and the domain."""

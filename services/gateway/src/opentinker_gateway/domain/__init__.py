"""The rules of the gateway: prompts, tool calls, recorded episodes. No HTTP, no grpc and no protobuf."""

"""The rules of env_host: episodes, their order and replay, pools of workers. No grpc and no protobuf."""

"""Rules: job states, slot allocation, leases, attempts. No SQL, no gRPC, no clock of its own."""

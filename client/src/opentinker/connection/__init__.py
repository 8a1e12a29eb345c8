"""How the client reaches a cluster: its event loop, channels, jobs, blobs, the embedded stack."""

"""The scheduler: jobs, servers, leases, the catalog of policies, and runs."""

"""Many runs: sweeps, a cluster, and the report of what came out."""

"""What things cost: collectives, resharding, compute, and the report of a plan."""

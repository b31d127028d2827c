"""From a graph and a mesh to a sharding: strategies, folding, reductions, ILP."""

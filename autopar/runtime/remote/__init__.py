"""Steps on meshes of other processes: what a worker process does, and the arrays it holds.

Nothing here knows how the processes were started."""

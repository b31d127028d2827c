"""Machine profiles: from devices, or a Ray cluster, to a `MachineProfile` and its file.

profile_machine    the entry: which samples are taken, again, and kept
cluster, worker    the same on a Ray cluster
ranks, rank_group  the same in several processes of `jax.distributed`
samples            the list of samples for some devices
works, links       what a sample runs
repeating          how it is repeated and timed
unfinished         the file of an interrupted run
text               profiles as text
"""

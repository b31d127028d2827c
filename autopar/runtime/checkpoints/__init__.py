"""Checkpoints: a pytree of arrays to a folder and back, onto any plan or number of devices."""

"""Checkpoints: a pytree of arrays to a folder and back, onto any plan or number of devices."""

from autopar.runtime.checkpoints.backends import Backend, HostPlace, ScalarPlace, register_backend
from autopar.runtime.checkpoints.find import checkpoint_steps, latest_step
from autopar.runtime.checkpoints.format import Entry, Leaf, Manifest, Shard, read_manifest
from autopar.runtime.checkpoints.leaves import canonical
from autopar.runtime.checkpoints.read import read_arrays
from autopar.runtime.checkpoints.save import CheckpointSave, finish_saves, save_checkpoint
from autopar.runtime.checkpoints.write import snapshot, write_parts, write_shards

__all__ = [
    "Backend",
    "CheckpointSave",
    "Entry",
    "HostPlace",
    "Leaf",
    "Manifest",
    "ScalarPlace",
    "Shard",
    "canonical",
    "checkpoint_steps",
    "finish_saves",
    "latest_step",
    "read_arrays",
    "read_manifest",
    "register_backend",
    "save_checkpoint",
    "snapshot",
    "write_parts",
    "write_shards",
]

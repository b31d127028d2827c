"""Machines are measured: from devices, or a Ray cluster, to a `MachineProfile` and its file.

`profile_machine` is the entry; `running` is the order of things, `samples` what is measured,
`works` and `links` how.
"""

from autopar.measure.profile.profile_machine import profile_machine
from autopar.measure.profile.text import show_profile

__all__ = ["profile_machine", "show_profile"]

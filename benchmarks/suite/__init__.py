"""The suite behind `autopar bench`: autopar beside what experts write by hand, one table for all.

`cases` says which models on which devices, `judge` what a compiled program is worth, `compiling`
makes one result in a process of its own (`benchmarks.experts.measured_cpu` the measured ones),
`pool` runs many of those, `tables` turns the results file into text, `command` is what `autopar
bench` calls.
"""

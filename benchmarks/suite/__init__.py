"""The suite behind `autopar bench`: autopar against hand-written experts, one table for all.

`cases` lists the models and devices, `judge` turns a compiled program into seconds, `compiling`
makes one result in its own process (`benchmarks.experts.measured_cpu` makes the measured ones),
`pool` runs many of those, `tables` turns the results file into text, and `autopar bench` calls
`command`.
"""

"""Plans measured on eight ranks of one GPU: predictions, regret, and autopar against experts.

    models → candidate plans with predictions (`plans`)            no GPU needed
    plans → measured steps, by eight processes (`driver`, `rank`)
    measured steps → summaries and tables (`tables`)

`python -m benchmarks.shared_gpu --help` shows the command. Plans are files, so they can be made
elsewhere. Only plans on one mesh run here: a pipeline needs workers that autopar starts. If
autopar's search prefers a pipeline, the row says so, with its predicted time, and the best plan on
one mesh is measured.
"""

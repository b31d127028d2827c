"""Plans kept on disk: what decides a plan → its key → a file in the user's cache folder.

    canonical   any value of a program or a method → data that prints the same in every process
    key         traced step, cluster, method, versions → key, or why there is none
    folder      key ↔ file: written whole, limited in size, shared by processes
    entry       a planned step ↔ the content of its file

The compiler asks for a key after the one trace that the executable uses anyway. On a hit nothing is
solved: the plan is read, checked and bound to the trace as a plan from any other file is.
"""

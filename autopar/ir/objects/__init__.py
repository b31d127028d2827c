"""Objects of other libraries among the arguments and results of a step.

    nnx              objects that the step changes in place, as under `nnx.jit`: arguments with
                     objects → arguments with `ObjectTree`s, and from the `PureResult` of the pure
                     function back to the caller's objects
    equinox_modules  modules whose leaves that are no arrays are part of the program, as under
                     `eqx.filter_jit`

Neither library is imported here: objects of a library that nobody imported cannot occur.
"""

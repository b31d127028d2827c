"""Large models as shapes, and how long they take to plan: `python -m benchmarks.planning_zoo`."""

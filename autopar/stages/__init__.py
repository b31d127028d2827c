"""From the layers of a step to its pipeline: tables of costs, the stage search, schedules."""

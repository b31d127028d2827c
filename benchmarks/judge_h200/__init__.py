"""The judge of compiled programs and the planner's figures, against steps run on an H200."""

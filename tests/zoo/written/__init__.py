"""Train steps written for the zoo; a module per family."""

"""Data only: meshes, layouts, graphs and plans, with their checkers."""

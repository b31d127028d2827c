"""Tracing: from a user's function to a program, and from the program to a graph."""

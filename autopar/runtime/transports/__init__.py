"""Transports: carry tiles of arrays from the devices of one process to those of another."""

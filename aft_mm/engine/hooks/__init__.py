"""Hooks of a run, one file per purpose; the package `engine` exports them."""

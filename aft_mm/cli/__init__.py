"""The command line: imports everything, imported by nothing in the package."""

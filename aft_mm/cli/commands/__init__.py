"""What a command of aft_mm does, a module each, imported when its arguments are known."""

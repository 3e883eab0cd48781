"""Other engines, each run by a script of its own in an environment of its own."""

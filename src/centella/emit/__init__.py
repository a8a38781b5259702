"""From a traced kernel to what a backend compiles: programs, and the text of each target."""

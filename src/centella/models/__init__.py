"""The architectures, one file each; `tasks.families.FAMILIES` has a row for each."""

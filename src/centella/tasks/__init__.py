"""From a model folder to what it is used for."""

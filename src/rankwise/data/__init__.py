"""Tasks to train on."""

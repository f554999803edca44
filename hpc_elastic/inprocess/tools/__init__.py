"""Tools for trying the restart group out."""

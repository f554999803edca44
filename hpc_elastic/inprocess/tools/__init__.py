"""Tools for whoever tries the ring out."""

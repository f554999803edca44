"""Clocks, files on filesystems that may hang, waking, records, text: the base of all other packages."""

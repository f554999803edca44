"""Clocks, files on filesystems that may hang, a loop's waits, records, text: the base of all other packages."""

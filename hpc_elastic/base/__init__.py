"""What every other package stands on: clocks, files on filesystems that may hang, waking, records, text."""

"""Modules that run in the user's training process: heartbeat, section, should_checkpoint, callbacks."""

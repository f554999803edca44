"""What runs in the user's training process: heartbeat, section, should_checkpoint, callbacks."""

"""What a daemon hands to the next one of its service, with its memory."""

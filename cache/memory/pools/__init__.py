"""Which bytes of the arena belong to which object."""

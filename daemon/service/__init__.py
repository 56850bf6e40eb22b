"""The daemon's shell: sockets, threads, shared memory, and access to them."""

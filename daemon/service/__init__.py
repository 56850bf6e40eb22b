"""The daemon's shell: sockets, threads, shared memory, and who may use them."""
